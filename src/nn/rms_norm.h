// rms_norm.h — RMSNorm with a learned weight.
#pragma once

#include "nn/parameter.h"
#include "ops/norm.h"

namespace tandem::nn {

struct RmsNorm {
  Parameter* weight = nullptr;  // [D]
  float eps = 1e-5F;

  void forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat x) const {
    ops::rms_norm(ctx, y, x, weight->value_vec(), eps);
  }
  /// For an op that norms the rows it makes.
  [[nodiscard]] RowNorm of_rows(F32Mat y) const { return {y, weight->value_vec(), eps}; }
  /// d_x is overwritten.
  void backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, ConstF32Mat x) const {
    ops::rms_norm_bwd(ctx, d_x, weight->grad_vec(), d_y, x, weight->value_vec(), eps);
  }
};

}  // namespace tandem::nn
