// attn_res.h — Attention Residuals: a softmax over depth that mixes the bank rows and the running
// prefix sum. Source: kimi-k3.md 3.
#pragma once

#include <span>

#include "ops/exec_ctx.h"
#include "ops/norm.h"
#include "tensor/view.h"

namespace tandem {

struct AttnResOps {
  void (*aggregate)(const ExecCtx&, F32Mat out, const RowNorm& norm,
                    std::span<const ConstF32Mat> sources, ConstF32Vec w, ConstF32Vec u, float eps);
  void (*aggregate_bwd)(const ExecCtx&, std::span<const F32Mat> d_sources, F32Vec d_w, F32Vec d_u,
                        ConstF32Mat d_out, std::span<const ConstF32Mat> sources, ConstF32Vec w,
                        ConstF32Vec u, float eps);
};

namespace ops {

/// s_i = rms-normalised source i . (w * u); p = softmax_i(s); out = sum_i p_i source_i, per row.
/// norm.y = out (mean(out^2) + norm.eps)^-1/2 * norm.w, if wanted: a row reduced in a fixed order,
/// which need not be the order of ops::rms_norm(). `out` may then be a default view: it is not
/// wanted. Shapes: out and each of the n sources [T, D] (bank rows in order, the prefix sum last);
/// w, u [D]; 1 <= n <= 32. With n = 1 the result is the row itself.   Aliasing: none.
void attn_res(const ExecCtx& ctx, F32Mat out, const RowNorm& norm,
              std::span<const ConstF32Mat> sources, ConstF32Vec w, ConstF32Vec u, float eps);
/// d_sources, d_w and d_u are all ACCUMULATED (a bank row is used by every later site).
void attn_res_bwd(const ExecCtx& ctx, std::span<const F32Mat> d_sources, F32Vec d_w, F32Vec d_u,
                  ConstF32Mat d_out, std::span<const ConstF32Mat> sources, ConstF32Vec w,
                  ConstF32Vec u, float eps);

}  // namespace ops
}  // namespace tandem
