// mla_decode_host.h — absorbed MLA by the Hopper kernel, if it can: mla_decode.h.
#pragma once

#include "ops/mla.h"

namespace tandem::cuda {

/// Attends and returns true, or does nothing and returns false: not on this GPU, or not this shape.
/// For one model and device the answer is always the same.
bool mla_decode(const ExecCtx& ctx, F32Cube o_lat, F32Mat lse, const MlaQuery& q,
                const MlaCacheView& cache, const MlaBatch& batch, float scale);

}  // namespace tandem::cuda
