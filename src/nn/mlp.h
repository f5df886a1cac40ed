// mlp.h — the SiTU-gated MLP: dense first layer and shared experts.   Source: kimi-k3.md 6.1.
#pragma once

#include <array>

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

  /// The products with x that begin a forward.
  struct Products {
    ConstF32Mat x;
    F32Mat gate;  // [T, F]
    F32Mat up;    // [T, F]
  };

  Linear gate_proj;
  Linear up_proj;
  Linear down_proj;
  SituParams act;

  /// y = down_proj(SiTU(gate_proj(x), up_proj(x))).
  Saved forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, Arena& keep) const;
  /// forward() in two steps, for a caller with more products of the same x: take_products(), then
  /// calls() in a group of its own, then finish().
  [[nodiscard]] Products take_products(ConstF32Mat x, Arena& keep) const;
  [[nodiscard]] std::array<LinearCall, 2> calls(const Products& products) const;
  Saved finish(const ExecCtx& ctx, F32Mat y, const Products& products, Arena& keep) const;
  void backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, const Saved& saved,
                Linear::InputGrad mode) const;
};

}  // namespace tandem::nn
