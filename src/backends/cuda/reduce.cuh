// reduce.cuh — sums and maxima over a warp or a block, in one fixed order.
#pragma once

#include <cstdint>

namespace tandem::cuda {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;

/// `value`, the same in every lane, and for the compiler too: branches on it keep a warp together.
/// Nor does the compiler work it out again where it is needed.
template <typename T>
__device__ __forceinline__ T same_in_warp(T value) {
  return __shfl_sync(kFullWarp, value, 0);
}

/// Every lane gets the sum (butterfly: the same bits in every lane).
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

/// The sum over this lane and those before it.
template <typename T>
__device__ __forceinline__ T warp_running_sum(T value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const T left = __shfl_up_sync(kFullWarp, value, offset);
    value += lane >= offset ? left : T{0};
  }
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

/// Every thread of a block of kThreads gets the sum. `scratch` holds kThreads / 32 values; two
/// calls in a row may use the same one.
template <int kThreads, typename T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) {
    scratch[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  T total = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    total += scratch[warp];
  }
  __syncthreads();  // read by all before the next call writes
  return total;
}

}  // namespace tandem::cuda
