// norm.cuh — what a norm computes of the elements of a row.   Contract: ops/norm.h
// A head's row belongs to a warp: lane l sums the squares of its quads l, l + 32, ... in order,
// then the lanes are summed by warp_sum().
#pragma once

#include <cmath>
#include <cstdint>

#include "backends/cuda/quad.cuh"

namespace tandem::cuda {

__device__ __forceinline__ float rms_scale(float squares, std::int64_t width, float eps) {
  return 1.0F / sqrtf(squares / static_cast<float>(width) + eps);
}
__device__ __forceinline__ float l2_scale(float squares, float factor, float eps) {
  return factor / sqrtf(squares + eps);
}

/// An element of the gated RMSNorm; `open` is sigmoid(gate).
__device__ __forceinline__ float gated_value(float x, float scale, float w, float open) {
  return x * scale * w * open;
}

}  // namespace tandem::cuda
