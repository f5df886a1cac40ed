// mla_tile.cuh — a tile of 32 rows in shared memory, one a lane: the fp32 attention kernels.
#pragma once

#include <cstdint>

#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {

inline constexpr int kTileRows32 = kWarp;

/// Floats from one row of a tile to the next: odd, so that lanes on 32 rows meet no bank conflict.
[[nodiscard]] __host__ __device__ constexpr int tile_stride(int width) {
  return width | 1;
}
/// Floats of a vector that lanes read four at a time.
[[nodiscard]] __host__ __device__ constexpr int padded_4(int width) {
  return (width + 3) / 4 * 4;
}

/// tile[j] = row(j) for j < count, zeros for the others up to 32. Warps of the block take rows in
/// turn; the caller synchronises. row(j)[d] is element d < width, a float or what reads as one.
template <typename RowFn>
__device__ __forceinline__ void load_tile(float* tile, int width, int count, const RowFn& row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  for (int j = static_cast<int>(threadIdx.x) / kWarp; j < kTileRows32; j += warps) {
    float* const to = tile + j * tile_stride(width);
    const auto from = row(min(j, count - 1));
    const bool there = j < count;
    for (int d = lane; d < width; d += kWarp) {
      to[d] = there ? from[d] : 0.0F;
    }
  }
}

__device__ __forceinline__ void load_vector(float* to, const float* from, int width) {
  for (int d = static_cast<int>(threadIdx.x) % kWarp; d < width; d += kWarp) {
    to[d] = from[d];
  }
}

/// x . row over `width` channels in four chains. x: 16-byte aligned, the same in all lanes.
__device__ __forceinline__ float dot_row(const float* x, const float* row, int width) {
  float sum[4] = {};
  int d = 0;
  for (; d + 4 <= width; d += 4) {
    const float4 four = *reinterpret_cast<const float4*>(x + d);
    sum[0] = fmaf(four.x, row[d], sum[0]);
    sum[1] = fmaf(four.y, row[d + 1], sum[1]);
    sum[2] = fmaf(four.z, row[d + 2], sum[2]);
    sum[3] = fmaf(four.w, row[d + 3], sum[3]);
  }
  for (; d < width; ++d) {
    sum[0] = fmaf(x[d], row[d], sum[0]);
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/// start + sum over the tile's rows j, in order, of weight[j] * tile[j][column].
__device__ __forceinline__ float weighted_column(float start, const float* weight,
                                                 const float* tile, int width, int column) {
  const int stride = tile_stride(width);
  const float* at = tile + column;
  float sum = start;
#pragma unroll
  for (int j = 0; j < kTileRows32; j += 4) {
    const float4 four = *reinterpret_cast<const float4*>(weight + j);
    sum = fmaf(four.x, at[0], sum);
    sum = fmaf(four.y, at[stride], sum);
    sum = fmaf(four.z, at[2 * stride], sum);
    sum = fmaf(four.w, at[3 * stride], sum);
    at += 4 * stride;
  }
  return sum;
}

/// The running softmax of a warp's row of scores.
struct Softmax {
  float top = -INFINITY;
  float sum = 0.0F;

  /// Takes this lane's score (valid or not); returns its weight, and what earlier sums shrink by.
  __device__ __forceinline__ float2 add(float score, bool valid) {
    const float masked = valid ? score : -INFINITY;
    const float next = fmaxf(top, warp_max(masked));
    const float weight = valid ? expf(score - next) : 0.0F;
    const float shrink = expf(top - next);
    sum = fmaf(sum, shrink, warp_sum(weight));
    top = next;
    return {weight, shrink};
  }
};

}  // namespace tandem::cuda
