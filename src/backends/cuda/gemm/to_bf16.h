// to_bf16.h — activations rounded to bf16 once, for the paths that read them several times.
#pragma once

#include <cstdint>

#include "ops/exec_ctx.h"
#include "tensor/view.h"

namespace tandem::cuda {

/// to[(t * H + h) * width + k] = x[t, h, k] to nearest even, zeros from x's width on.   Shapes: x
/// [T, H, K]; width >= K, a multiple of 8; `to` aligned to 16 bytes.
void to_bf16(const ExecCtx& ctx, std::uint16_t* to, std::int64_t width, ConstF32Cube x);

}  // namespace tandem::cuda
