// tensor.h — linear layers on the tensor cores: bf16, FP8, MXFP4 and NVFP4 weights packed as
// layout.h says, activations rounded to bf16, sums in fp32.
// Determinism: batch-invariant. The order of additions is layout.h's segments, whatever kernel runs.
#pragma once

#include <span>

#include "ops/gemm.h"

namespace tandem::cuda {

/// y = x W^T, or y += x W^T when `accumulate`.   Shapes: as ops::linear.
void tensor_linear(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w,
                   bool accumulate);

/// The same with one weight a head, all of one shape and format.   Shapes: as ops::linear_heads.
void tensor_linear_heads(const ExecCtx& ctx, F32Cube y, ConstF32Cube x,
                         std::span<const PackedWeight> w, bool accumulate);

}  // namespace tandem::cuda
