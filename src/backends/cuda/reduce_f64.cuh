// reduce_f64.cuh — the sums of reduce.cuh in double.
#pragma once

#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {

/// Every lane gets the sum (butterfly: the same bits in every lane).
__device__ __forceinline__ double warp_sum_f64(double value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

/// Every thread of a block of kThreads gets the sum. `scratch` holds kThreads / 32 doubles; two
/// calls in a row may use the same one.
template <int kThreads>
__device__ __forceinline__ double block_sum_f64(double value, double* scratch) {
  value = warp_sum_f64(value);
  if (threadIdx.x % kWarp == 0) {
    scratch[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  double total = 0.0;
#pragma unroll 4
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    total += scratch[warp];
  }
  __syncthreads();  // read by all before the next call writes
  return total;
}

}  // namespace tandem::cuda
