// pack.h — from a checkpoint's layout to panels (panel.h).
#pragma once

#include "ops/gemm.h"

namespace tandem::gemm {

void pack(const ExecCtx& ctx, PackedWeight& packed, const WeightRef& weight,
          Orientation orientation);

}  // namespace tandem::gemm
