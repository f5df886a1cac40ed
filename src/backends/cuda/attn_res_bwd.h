// attn_res_bwd.h — backward pass of Attention Residuals, for attn_res.cu's table.
// Contract: ops/attn_res.h
#pragma once

#include <span>

#include "ops/exec_ctx.h"
#include "tensor/view.h"

namespace tandem::cuda {

void attn_res_bwd(const ExecCtx& ctx, std::span<const F32Mat> d_sources, F32Vec d_w, F32Vec d_u,
                  ConstF32Mat d_out, std::span<const ConstF32Mat> sources, ConstF32Vec w,
                  ConstF32Vec u, float eps);

}  // namespace tandem::cuda
