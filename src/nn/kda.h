// kda.h — the KDA mixer: projections, short convolutions, gated delta-rule recurrence, gated output
// norm. Source: kimi-k3.md 4. One forward serves prefill, decode and training; the states come with
// the batch.
#pragma once

#include <array>

#include "core/arena.h"
#include "nn/linear.h"
#include "ops/kda.h"
#include "ops/seq_batch.h"

namespace tandem::nn {

/// The recurrent memory of one KDA layer: one record a slot.
struct KdaCacheView {
  KdaStatePool states;  // [slots, H, K, V]
  F32Cube conv;         // [slots, W-1, 3 * H * K]: raw q | k | v projections
};

class Kda {
 public:
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;
  KdaGateParams gate;
  float norm_eps = 1e-5F;

  Linear q_proj, k_proj, v_proj, g_proj, f_a_proj, f_b_proj, b_proj, o_proj;
  Parameter* q_conv1d = nullptr;  // [H*K, 1, W]
  Parameter* k_conv1d = nullptr;
  Parameter* v_conv1d = nullptr;
  Parameter* A_log = nullptr;    // [>= H], the first H are used
  Parameter* dt_bias = nullptr;  // [H*K]
  Parameter* o_norm = nullptr;   // [K]

  struct Saved {
    ConstF32Mat x;         // [T, D]
    ConstF32Mat qkv;       // [T, 3P] raw projections
    ConstF32Mat qkv_conv;  // [T, 3P] after convolution and SiLU
    ConstF32Mat qk;        // [T, 2P] q and k L2-normalised, q scaled
    ConstF32Mat f_a, f;    // [T, K], [T, P]
    ConstF32Mat g;         // [T, P] log decay
    ConstF32Mat beta;      // [T, H]
    ConstF32Mat o;         // [T, P] recurrence output
    ConstF32Mat gate_out;  // [T, P]
    ConstF32Mat normed;    // [T, P] input of o_proj
    const float* checkpoints = nullptr;
  };

  /// y [T, D] = base + mixer(x); base may be empty or y. `cache` is null in training: states start
  /// at zero, and what the backward needs is kept. Otherwise nothing of the result is meant to be
  /// used.
  Saved forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, ConstF32Mat x, const SeqBatch& seqs,
                const KdaCacheView* cache, Arena& keep) const;
  /// d_x is overwritten.
  void backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, const SeqBatch& seqs,
                const Saved& saved) const;

 private:
  [[nodiscard]] std::int64_t width() const { return num_heads * head_dim; }
  [[nodiscard]] ConstF32Vec a_log_used() const { return {A_log->value().data(), {num_heads}}; }
  [[nodiscard]] float q_scale() const;
  [[nodiscard]] KdaInputs inputs(const Saved& saved) const;
  [[nodiscard]] std::array<ConstF32Mat, 3> filters() const;
  [[nodiscard]] KdaDecode step(ConstF32Mat qkv, ConstF32Mat f_a, ConstF32Mat b,
                               ConstF32Mat gate_out) const;
  void backward_core(const ExecCtx& ctx, F32Mat d_qkv, F32Mat d_g, F32Mat d_beta, ConstF32Mat d_o,
                     const SeqBatch& seqs, const Saved& saved) const;
};

}  // namespace tandem::nn
