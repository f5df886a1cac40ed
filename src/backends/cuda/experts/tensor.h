// tensor.h — the routed experts on the tensor cores, for inference.
#pragma once

#include "ops/moe.h"

namespace tandem::cuda {

/// ops/moe.h's experts() without `saved`, for weights that are not kF32.
void tensor_experts(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, ConstF32Mat x,
                    ConstI32Mat ids, ConstF32Mat weights, const ExpertWeights& experts,
                    SituParams act);

}  // namespace tandem::cuda
