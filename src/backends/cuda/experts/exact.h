// exact.h — the routed experts by gemm/exact.h's products: for every format, and all of training.
#pragma once

#include "ops/moe.h"

namespace tandem::cuda {

void exact_experts(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, const ExpertsSaved* saved,
                   ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights,
                   const ExpertWeights& experts, SituParams act);
void exact_experts_bwd(const ExecCtx& ctx, F32Mat d_x, F32Mat d_weights, const ExpertGrads& grads,
                       ConstF32Mat d_out, ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights,
                       const ExpertWeights& experts_transposed, const ExpertsSaved& saved,
                       SituParams act);

}  // namespace tandem::cuda
