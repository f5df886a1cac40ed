// convert.cuh — conversions between fp32 and packed bf16 or e4m3 pairs. One wrapper an instruction.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

#include "backends/cuda/ptx/mma.cuh"

namespace tandem::cuda::ptx {

/// Two fp32 rounded to e4m3, nearest even, saturating at 448; NaN stays NaN. `low` in the lower
/// byte.   PTX ISA 7.8, sm_89.
__device__ __forceinline__ std::uint16_t cvt_e4m3x2(float low, float high) {
  std::uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

/// The low two bytes of `codes` as fp32: over f16, which holds every e4m3 value. NaN stays NaN.
/// PTX ISA 7.8, sm_89.
__device__ __forceinline__ float2 e4m3x2_to_float2(std::uint32_t codes) {
  std::uint32_t half;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half) : "h"(static_cast<std::uint16_t>(codes)));
  return __half22float2(*reinterpret_cast<const __half2*>(&half));
}

}  // namespace tandem::cuda::ptx
