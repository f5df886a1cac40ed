// exact_launch.h — the launchers of exact_linear.cuh, one a source file: they compile side by side.
#pragma once

#include <span>

#include "ops/gemm.h"

namespace tandem::cuda {

struct LinearShape;

void launch_linear_f32(const ExecCtx& ctx, const char* op, const LinearShape& shape,
                       std::span<const PackedWeight> weights);
/// For kBF16 and the packed formats; all weights of one format.
void launch_linear_tiled(const ExecCtx& ctx, const char* op, const LinearShape& shape,
                         std::span<const PackedWeight> weights);

}  // namespace tandem::cuda
