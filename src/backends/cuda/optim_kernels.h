// optim_kernels.h — what the optimizer ops share.
#pragma once

#include <cstdint>
#include <span>

#include "ops/optim.h"

namespace tandem::cuda {

/// The sum of squares, left in device memory of the workspace (the caller's scope). The order of
/// summation depends on the length alone. An empty span gives 0.
[[nodiscard]] const double* device_sum_squares(const ExecCtx& ctx, std::span<const float> values);

void muon(const ExecCtx& ctx, F32Mat w, F32Mat momentum, ConstF32Mat g, const MuonParams& params);

}  // namespace tandem::cuda
