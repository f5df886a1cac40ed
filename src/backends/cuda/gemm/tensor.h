// tensor.h — linear layers on the tensor cores, for weights that are not kF32.
#pragma once

#include <span>

#include "ops/gemm.h"

namespace tandem::cuda {

void tensor_linear(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w,
                   bool accumulate);
void tensor_linear_heads(const ExecCtx& ctx, F32Cube y, ConstF32Cube x,
                         std::span<const PackedWeight> w, bool accumulate);
void tensor_linear_sum(const ExecCtx& ctx, F32Mat y, ConstF32Mat base,
                       std::span<const LinearTerm> terms);
/// No weight is kF32.
void tensor_linear_group(const ExecCtx& ctx, std::span<const LinearCall> calls);

}  // namespace tandem::cuda
