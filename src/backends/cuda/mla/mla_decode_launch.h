// mla_decode_launch.h — the kernels of mla_decode.cu, a file each: of mla_decode_kernel.cuh one a
// format of rows.
#pragma once

#include "backends/cuda/mla/mla_decode.h"
#include "ops/exec_ctx.h"

namespace tandem::cuda {

struct DecodeArgs;
using DecodeKernel = void (*)(DecodeArgs);

/// Merges the splits of the launch's rows; rows of one split or none are done.
void mla_decode_merge(const ExecCtx& ctx, const DecodeArgs& x);

[[nodiscard]] DecodeKernel decode_kernel_bf16(const DecodeConfig& config);
[[nodiscard]] DecodeKernel decode_kernel_f32(const DecodeConfig& config);
[[nodiscard]] DecodeKernel decode_kernel_fp8(const DecodeConfig& config);

}  // namespace tandem::cuda
