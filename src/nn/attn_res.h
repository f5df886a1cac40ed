// attn_res.h — one Attention Residuals site: a key norm weight and a pseudo-query.   Source:
// kimi-k3.md 3.
#pragma once

#include "nn/parameter.h"
#include "nn/rms_norm.h"
#include "ops/attn_res.h"

namespace tandem::nn {

struct AttnRes {
  Parameter* norm = nullptr;  // [D]
  Parameter* proj = nullptr;  // [1, D]
  float eps = 1e-5F;

  /// out = the aggregate, x = after(out); `out` may be a default view, which is not written.
  void forward(const ExecCtx& ctx, F32Mat out, F32Mat x, std::span<const ConstF32Mat> sources,
               const RmsNorm& after) const {
    ops::attn_res(ctx, out, after.of_rows(x), sources, norm->value_vec(), proj->value_vec(), eps);
  }
  /// d_sources are accumulated.
  void backward(const ExecCtx& ctx, std::span<const F32Mat> d_sources, ConstF32Mat d_out,
                std::span<const ConstF32Mat> sources) const {
    ops::attn_res_bwd(ctx, d_sources, norm->grad_vec(), proj->grad_vec(), d_out, sources,
                      norm->value_vec(), proj->value_vec(), eps);
  }
};

}  // namespace tandem::nn
