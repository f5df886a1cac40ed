// row_group.cuh — who works on one row: a whole block (long rows) or one warp of it (head rows).
// Thread `rank` of a group owns quads rank, rank + kSize, ... of a row.
#pragma once

#include <cstdint>

#include "backends/cuda/quad.cuh"
#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {

constexpr int kRowThreads = 256;  // of a block, for either group

struct BlockGroup {
  static constexpr int kSize = kRowThreads;
  static constexpr int kPerBlock = 1;
  __device__ static int index() { return 0; }
  __device__ static int rank() { return static_cast<int>(threadIdx.x); }
  /// Every thread of the group gets the sum; all of them must call.
  __device__ static float sum(float value) {
    __shared__ float scratch[kRowThreads / kWarp];
    return block_sum<kRowThreads>(value, scratch);
  }
};

struct WarpGroup {
  static constexpr int kSize = kWarp;
  static constexpr int kPerBlock = kRowThreads / kWarp;
  __device__ static int index() { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ static int rank() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static float sum(float value) { return warp_sum(value); }
};

/// Where this thread's quad number q begins.
template <typename Group>
__device__ __forceinline__ std::int64_t quad_start(int q) {
  return static_cast<std::int64_t>(q * Group::kSize + Group::rank()) * kQuad;
}

}  // namespace tandem::cuda
