// mlp.h — the SiTU-gated MLP: dense first layer and shared experts.   Source: kimi-k3.md 6.1.
#pragma once

#include <vector>

#include "core/arena.h"
#include "nn/linear.h"
#include "ops/act.h"

namespace tandem::nn {

class Mlp {
 public:
  struct Saved {
    ConstF32Mat x;     // [T, D] input
    ConstF32Mat gate;  // [T, F] x gate_proj^T
    ConstF32Mat up;    // [T, F] x up_proj^T
    ConstF32Mat act;   // [T, F] SiTU(gate, up)
  };

  /// What a forward begins with; gate and up are empty unless the backward wants them.
  struct Products {
    ConstF32Mat x;
    F32Mat gate;  // [T, F]
    F32Mat up;    // [T, F]
    F32Mat act;   // [T, F]
  };

  Linear gate_proj;
  Linear up_proj;
  Linear down_proj;
  SituParams act;

  /// y = base + down_proj(SiTU(gate_proj(x), up_proj(x))); base may be empty or y.
  Saved forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, ConstF32Mat x, bool training,
                Arena& keep) const;
  /// forward() in steps, for a caller with more layers of the same x: take_products(), add_calls()
  /// to a group of its own, activate(), and then down_proj.
  [[nodiscard]] Products take_products(ConstF32Mat x, bool training, Arena& keep) const;
  void add_calls(std::vector<LinearCall>& group, const Products& products) const;
  [[nodiscard]] Saved activate(const ExecCtx& ctx, const Products& products) const;
  void backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, const Saved& saved,
                Linear::InputGrad mode) const;
};

}  // namespace tandem::nn
