// mla.h — the gated NoPE MLA mixer, absorbed form, over a paged latent cache.   Source:
// kimi-k3.md 5. One forward serves prefill, decode and training: in training the keys are the
// batch's own latent rows.
#pragma once

#include <vector>

#include "core/arena.h"
#include "nn/linear.h"
#include "nn/rms_norm.h"
#include "ops/mla.h"

namespace tandem::nn {

/// Where this call's latent rows go and where the keys are.
struct MlaCacheUse {
  LatentRows rows;
  ConstI32Mat page_table;
  std::int64_t page_size = 1;
  ConstI32Vec slot_mapping;  // [T] row of `rows` for each new token
  MlaBatch batch;
};

class Mla {
 public:
  std::int64_t num_heads = 0;
  std::int64_t kv_lora_rank = 0;      // DL
  std::int64_t qk_nope_head_dim = 0;  // DN
  std::int64_t qk_rope_head_dim = 0;  // DR, never rotated
  std::int64_t v_head_dim = 0;        // V

  Linear q_a_proj, q_b_proj, kv_a_proj, g_proj, o_proj;
  RmsNorm q_a_norm, kv_a_norm;

  /// Cuts kv_b_proj [H * (DN + V), DL] into the per-head pieces of the absorbed form.
  void set_kv_b(const ExecCtx& ctx, const WeightRef& weight);
  void set_kv_b(const ExecCtx& ctx, Parameter& master);
  void refresh(const ExecCtx& ctx);

  struct Saved {
    ConstF32Mat x;           // [T, D]
    ConstF32Mat cq_raw, cq;  // [T, q_lora] before and after the norm
    ConstF32Mat q;           // [T, H * (DN+DR)]
    ConstF32Mat kv_raw, kv;  // [T, DL+DR] before the norm, and after (kv: training only)
    ConstF32Cube q_lat;      // [T, H, DL]
    ConstF32Cube o_lat;      // [T, H, DL]
    ConstF32Mat lse;         // [T, H]
    ConstF32Mat o;           // [T, H * V]
    ConstF32Mat gate;        // [T, H * V]
    ConstF32Mat gated;       // [T, H * V] input of o_proj
  };

  /// y [T, D] = base + mixer(x); base may be empty or y. `use` is null in training.
  Saved forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, ConstF32Mat x,
                ConstI32Vec cu_seqlens, const MlaCacheUse* use, Arena& keep) const;
  /// d_x is overwritten.
  void backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, ConstI32Vec cu_seqlens,
                const Saved& saved) const;

  [[nodiscard]] std::int64_t cache_width() const { return kv_lora_rank + qk_rope_head_dim; }
  [[nodiscard]] std::int64_t kv_b_bytes() const;

 private:
  [[nodiscard]] float scale() const;
  [[nodiscard]] WeightRef head_rows(const WeightRef& weight, std::int64_t head, std::int64_t begin,
                                    std::int64_t count) const;
  [[nodiscard]] MlaQuery query_of(const Saved& saved) const;
  void prepare(const ExecCtx& ctx, F32Mat cq, F32Mat kv, const Saved& saved,
               const MlaCacheUse* use) const;
  void attend(const ExecCtx& ctx, const Saved& saved, F32Cube o_lat, F32Mat lse,
              ConstI32Vec cu_seqlens, const MlaCacheUse* use) const;
  void backward_kv_b(const ExecCtx& ctx, F32Cube d_q_n, ConstF32Cube d_q_lat, ConstF32Cube d_o,
                     const Saved& saved) const;

  Parameter* kv_b_ = nullptr;
  std::vector<PackedWeight> w_uk_;    // [H] q_n -> q_lat
  std::vector<PackedWeight> w_uv_;    // [H] o_lat -> o
  std::vector<PackedWeight> w_uk_t_;  // [H] d_q_lat -> d_q_n, trainable only
  std::vector<PackedWeight> w_uv_t_;  // [H] d_o -> d_o_lat, trainable only
};

}  // namespace tandem::nn
