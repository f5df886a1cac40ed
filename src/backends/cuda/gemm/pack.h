// pack.h — a weight of a checkpoint or of the optimizer, into gemm/layout.h's layout.
#pragma once

#include "ops/gemm.h"

namespace tandem::cuda {

/// As ops::pack. `weight` may lie in the device's memory or in the host's; from the host it is
/// copied piece by piece, and the call returns when the host's memory is no longer needed.
void pack(const ExecCtx& ctx, PackedWeight& packed, const WeightRef& weight,
          Orientation orientation);

}  // namespace tandem::cuda
