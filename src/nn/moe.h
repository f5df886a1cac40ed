// moe.h — LatentMoE: router, routed experts in a latent width, norm, up-projection, plus the shared
// experts. Source: kimi-k3.md 6.2, 6.3.
#pragma once

#include <vector>

#include "core/arena.h"
#include "nn/linear.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "ops/moe.h"

namespace tandem::nn {

/// The expert ids of one layer: written by every forward; read instead of chosen when `replay` (R3
/// routing replay).
struct Routing {
  I32Mat ids;  // [T, A]
  bool replay = false;
};

/// One weight matrix an expert, in the arrays the op wants.
class ExpertMatrix {
 public:
  void add(const ExecCtx& ctx, const WeightRef& weight);
  void add(const ExecCtx& ctx, Parameter& master);
  void refresh(const ExecCtx& ctx);

  [[nodiscard]] std::span<const PackedWeight> packed() const { return forward_; }
  [[nodiscard]] std::span<const PackedWeight> packed_transposed() const { return backward_; }
  [[nodiscard]] std::span<const F32Mat> grads() const { return grads_; }
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(forward_.size()); }
  [[nodiscard]] std::int64_t out() const { return forward_.front().out; }
  [[nodiscard]] std::int64_t packed_bytes() const;

 private:
  void pack_one(const ExecCtx& ctx, std::size_t expert);

  std::vector<PackedWeight> forward_;
  std::vector<PackedWeight> backward_;  // trainable only
  std::vector<Parameter*> masters_;     // trainable only
  std::vector<F32Mat> grads_;           // trainable only
};

class LatentMoe {
 public:
  std::int64_t num_experts_per_token = 0;
  RouterParams router;
  SituParams act;

  Linear gate;                // [E, D]
  Parameter* bias = nullptr;  // e_score_correction_bias [E], frozen
  Linear down_proj;           // routed_expert_down_proj [DX, D]
  Linear up_proj;             // routed_expert_up_proj [D, DX]
  RmsNorm norm;               // routed_expert_norm [DX]
  Mlp shared;

  ExpertMatrix w1, w3, w2;  // gate, up [F, DX] and down [DX, F] of every expert

  void refresh(const ExecCtx& ctx);

  struct Saved {
    ConstF32Mat x;         // [T, D]
    ConstI32Mat ids;       // [T, A]
    ConstF32Mat weights;   // [T, A]
    ConstF32Mat scores;    // [T, E]
    ConstF32Mat latent;    // [T, DX] down_proj(x)
    ConstF32Mat combined;  // [T, DX] before the norm; training only
    ConstF32Mat normed;    // [T, DX]
    ExpertsSaved experts;
    Mlp::Saved shared;
  };

  /// y = base + output [T, D]; base may be empty or y. `routing` may be null. Intermediate outputs
  /// of experts and their sum are kept only when `training`.
  Saved forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, ConstF32Mat x,
                const Routing* routing, bool training, Arena& keep) const;
  /// d_x is overwritten.
  void backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, const Saved& saved) const;
};

}  // namespace tandem::nn
