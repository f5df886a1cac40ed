// stream.cuh — the decode path of products with packed weights: at most 8 token rows, weights go
// straight from memory to registers, once. Shared by linear layers and experts.
// Schedule  A warp owns kBlocks blocks of 16 outputs and every k_warps-th segment of the inputs
//           (layout.h). It loads kLoad tiles of each block at once and then multiplies; nothing but
//           other warps hides its latency, so a CTA has no barrier before the last sum.
// Sum       Segments' sums go to shared memory and are added there in rising order, across a cluster
//           where the inputs are split over CTAs.
// Numerics  activations rounded to bf16; fp32 sums; the order of layout.h, so that neither the number
//           of rows nor warps nor CTAs change a bit.
#pragma once

#include <cooperative_groups.h>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/gemm/dequant.cuh"
#include "backends/cuda/gemm/plan.h"

namespace tandem::cuda {

inline constexpr int kStreamTokens = 8;
inline constexpr int kBlockElements = 128;  // a block's sums: 16 outputs x 8 tokens

/// One token's inputs in fp32, null where a lane has no token. Zero beyond `in`.
struct F32Inputs {
  const float* row = nullptr;
  int in = 0;
  bool pairs = false;  // `in` is a multiple of 16, and rows are aligned to 8 bytes

  /// The B fragment of the step that begins at input k.
  __device__ __forceinline__ void load(std::uint32_t (&b)[2], int k, int t) const {
    float2 low = make_float2(0.0F, 0.0F);
    float2 high = low;
    k += 2 * t;
    if (row != nullptr) {
      if (pairs) {
        if (k < in) {
          low = *reinterpret_cast<const float2*>(row + k);
          high = *reinterpret_cast<const float2*>(row + k + 8);
        }
      } else {
        low.x = k < in ? row[k] : 0.0F;
        low.y = k + 1 < in ? row[k + 1] : 0.0F;
        high.x = k + 8 < in ? row[k + 8] : 0.0F;
        high.y = k + 9 < in ? row[k + 9] : 0.0F;
      }
    }
    b[0] = ptx::cvt_bf16x2(low.x, low.y);
    b[1] = ptx::cvt_bf16x2(high.x, high.y);
  }
};

/// The same of a row of bf16 that is filled up to `in`, a multiple of 16.
struct Bf16Inputs {
  const std::uint16_t* row = nullptr;
  int in = 0;

  __device__ __forceinline__ void load(std::uint32_t (&b)[2], int k, int t) const {
    const bool valid = row != nullptr && k < in;
    const auto* pairs = reinterpret_cast<const std::uint32_t*>(row + k) + t;
    b[0] = valid ? pairs[0] : 0U;
    b[1] = valid ? pairs[4] : 0U;
  }
};

/// acc += the product with `kTiles` tiles from `tile` on: loads first, then a chain of mma.
template <WeightFormat F, int kBlocks, int kTiles, typename Inputs>
__device__ __forceinline__ void stream_tiles(float (&acc)[kBlocks][4],
                                             const TileRow (&rows)[kBlocks], const Inputs& inputs,
                                             int tile, int lane) {
  RawTile<F> raw[kTiles][kBlocks];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      load_tile(raw[i][m], rows[m], tile + i, lane);
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    TileScales scales[kBlocks];
    std::uint32_t b[kStepsPerTile][2];
#pragma unroll
    for (int step = 0; step < kStepsPerTile; ++step) {
      inputs.load(b[step], (tile + i) * static_cast<int>(kTileInputs) + step * 16, lane % 4);
    }
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      scales[m] = decode_scales(raw[i][m]);
    }
    each_step([&](auto step) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        std::uint32_t a[4];
        a_fragment<F, step.value>(a, raw[i][m], scales[m]);
        ptx::mma_m16n8k16_bf16(acc[m], a, b[step.value]);
      }
    });
  }
}

/// The calling warp's segments of [begin, end): sums to partial[m * slots + segment - begin], the
/// accumulators of all lanes in order.
template <WeightFormat F, int kBlocks, int kLoad, typename Inputs>
__device__ __forceinline__ void stream_segments(float4* partial, const TileRow (&rows)[kBlocks],
                                                const Inputs& inputs, const TensorShape& shape,
                                                const StreamPlan& plan) {
  constexpr int kSegmentTiles = static_cast<int>(segment_inputs(F) / kTileInputs);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int rank = static_cast<int>(blockIdx.x) % plan.cluster;
  const int begin = plan.begin(shape.segments, rank);
  const int end = plan.begin(shape.segments, rank + 1);
  for (int segment = begin + static_cast<int>(threadIdx.x / 32) % plan.k_warps; segment < end;
       segment += plan.k_warps) {
    float acc[kBlocks][4] = {};
    int tile = segment * kSegmentTiles;
    const int tiles_end = min(tile + kSegmentTiles, shape.k_tiles);
    for (; tile + kLoad <= tiles_end; tile += kLoad) {
      stream_tiles<F, kBlocks, kLoad>(acc, rows, inputs, tile, lane);
    }
    if constexpr (kLoad > 2) {  // the last segment may be shorter
      for (; tile + 2 <= tiles_end; tile += 2) {
        stream_tiles<F, kBlocks, 2>(acc, rows, inputs, tile, lane);
      }
    }
    for (; tile < tiles_end; ++tile) {
      stream_tiles<F, kBlocks, 1>(acc, rows, inputs, tile, lane);
    }
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      float4 sum = make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
      if constexpr (F == WeightFormat::kFp8Block) {
        const float scale = reinterpret_cast<const float*>(rows[m].scales)[segment];
        sum = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
      }
      partial[(m * plan.slots + segment - begin) * 32 + lane] = sum;
    }
  }
}

/// Where an element of a block's sums belongs.
struct BlockElement {
  int output;  // of the block's 16
  int token;   // of 8
};
__device__ __forceinline__ BlockElement block_element(int index) {
  const int lane = index / 4;
  return {lane / 4 + (index & 2) * 4, lane % 4 * 2 + (index & 1)};
}

/// One element's sum over all segments, in rising order; `base` is a CTA's first partial. All CTAs of
/// the cluster have passed a barrier since writing.
__device__ __forceinline__ float sum_segments(const float* base, int block, int index,
                                              const TensorShape& shape, const StreamPlan& plan) {
  const auto cluster = cooperative_groups::this_cluster();
  float total = 0.0F;
  for (int rank = 0; rank < plan.cluster; ++rank) {
    const float* from = plan.cluster == 1 ? base : cluster.map_shared_rank(base, rank);
    from += block * plan.slots * kBlockElements + index;
    const int count = plan.begin(shape.segments, rank + 1) - plan.begin(shape.segments, rank);
#pragma unroll 4
    for (int slot = 0; slot < count; ++slot) {
      total += from[slot * kBlockElements];
    }
  }
  return total;
}

/// A barrier of the CTAs that share an output.
__device__ __forceinline__ void cluster_barrier(int cluster) {
  if (cluster == 1) {
    __syncthreads();
  } else {
    cooperative_groups::this_cluster().sync();
  }
}

}  // namespace tandem::cuda
