// stream.cuh — the decode path of products with packed weights: at most 8 token rows, weights go
// straight from memory to registers, once. Shared by linear layers and experts.
// Schedule  A warp owns kBlocks blocks of 16 outputs and every k_warps-th segment of the inputs
//           (layout.h). It loads kLoad tiles of each block at once and then multiplies; nothing but
//           other warps hides its latency, so a CTA has no barrier before the last sum.
// Sum       Segments' sums go to shared memory and are added there in rising order, across a
// cluster
//           where the inputs are split over CTAs.
// Numerics  activations rounded to bf16; fp32 sums; the order of layout.h, so that neither the
// number
//           of rows nor warps nor CTAs change a bit.
#pragma once

#include <cooperative_groups.h>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/gemm/dequant.cuh"
#include "backends/cuda/gemm/multiply_tile.cuh"
#include "backends/cuda/gemm/plan.h"

namespace tandem::cuda {

inline constexpr int kStreamTokens = 8;
inline constexpr int kBlockElements = 128;  // a block's sums: 16 outputs x 8 tokens

/// One token's inputs in fp32, as a lane wants them: `at` is its row + 2t. kWhole: the inputs fill
/// tiles and rows are aligned to 8 bytes, so that nothing needs a test; lanes beyond the last token
/// then read another one's row, and nobody reads their results.
template <bool kWhole>
struct F32Inputs {
  const float* at;
  int in;  // left of the row at `at`

  __device__ __forceinline__ F32Inputs(const float* row, std::int64_t inputs, int lane)
      : at(row + lane % 4 * 2), in(static_cast<int>(inputs) - lane % 4 * 2) {}

  /// The B fragment of the step that begins at input k.
  __device__ __forceinline__ void load(std::uint32_t (&b)[2], int k) const {
    if constexpr (kWhole) {
      const float2 low = *reinterpret_cast<const float2*>(at + k);
      const float2 high = *reinterpret_cast<const float2*>(at + k + 8);
      b[0] = ptx::cvt_bf16x2(low.x, low.y);
      b[1] = ptx::cvt_bf16x2(high.x, high.y);
    } else {
      b[0] = ptx::cvt_bf16x2(k < in ? at[k] : 0.0F, k + 1 < in ? at[k + 1] : 0.0F);
      b[1] = ptx::cvt_bf16x2(k + 8 < in ? at[k + 8] : 0.0F, k + 9 < in ? at[k + 9] : 0.0F);
    }
  }
};

/// The same of a row of bf16 that is filled up to a multiple of 16, `inputs`, and aligned to 4
/// bytes.
template <bool kWhole>
struct Bf16Inputs {
  const std::uint32_t* at;
  int in;

  __device__ __forceinline__ Bf16Inputs(const std::uint16_t* row, std::int64_t inputs, int lane)
      : at(reinterpret_cast<const std::uint32_t*>(row) + lane % 4), in(static_cast<int>(inputs)) {}

  __device__ __forceinline__ void load(std::uint32_t (&b)[2], int k) const {
    const bool valid = kWhole || k < in;
    b[0] = valid ? at[k / 2] : 0U;
    b[1] = valid ? at[k / 2 + 4] : 0U;
  }
};

/// acc += the product with `kTiles` tiles from `tile` on: loads first, then a chain of mma.
template <WeightFormat F, int kBlocks, int kTiles, typename Inputs>
__device__ __forceinline__ void stream_tiles(float (&acc)[kBlocks][4],
                                             const TileRow (&rows)[kBlocks], const Inputs& inputs,
                                             int tile, int lane) {
  static_assert(kTiles <= 4);  // a lane of each four decodes one tile's scales
  RawTile<F> raw[kTiles][kBlocks];
  RawScales<F> codes[kBlocks];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    const TileRow first = rows[m].template at_tile<F>(tile);
    load_scales(codes[m], first, kTiles, lane);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      load_tile(raw[i][m], first, i, lane);
    }
  }
  __syncwarp();  // ptxas moves no load over it: all of them are under way before the first is
                 // needed
  TileScales scales[kBlocks];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    scales[m] = decode_scales(codes[m]);
  }
  const int first_input = tile * static_cast<int>(kTileInputs);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    std::uint32_t b[kStepsPerTile][2];
#pragma unroll
    for (int step = 0; step < kStepsPerTile; ++step) {
      inputs.load(b[step], first_input + (i * kStepsPerTile + step) * 16);
    }
    multiply_tile<F>(acc, raw[i], scales, i, b);
  }
}

/// acc += the product with a segment, kLoad tiles at a time; the last segment may be shorter.
template <WeightFormat F, int kBlocks, int kLoad, typename Inputs>
__device__ __forceinline__ void stream_segment(float (&acc)[kBlocks][4],
                                               const TileRow (&rows)[kBlocks], const Inputs& inputs,
                                               int tile, int k_tiles, int lane) {
  constexpr int kSegmentTiles = static_cast<int>(segment_inputs(F) / kTileInputs);
  static_assert(kSegmentTiles % kLoad == 0);
  if (tile + kSegmentTiles <= k_tiles) {
#pragma unroll
    for (int i = 0; i < kSegmentTiles; i += kLoad) {
      stream_tiles<F, kBlocks, kLoad>(acc, rows, inputs, tile + i, lane);
    }
    return;
  }
  for (; tile + 2 <= k_tiles; tile += 2) {
    stream_tiles<F, kBlocks, 2>(acc, rows, inputs, tile, lane);
  }
  if (tile < k_tiles) {
    stream_tiles<F, kBlocks, 1>(acc, rows, inputs, tile, lane);
  }
}

/// Asks for the first weights of each block of the CTA, from one thread a row of warps. Only a
/// hint, so it may come before begin_kernel(): memory then works while the kernel before ends.
template <WeightFormat F, int kBlocks>
__device__ __forceinline__ void prefetch_segments(const TileRow (&rows)[kBlocks],
                                                  const TensorShape& shape,
                                                  const StreamPlan& plan) {
  constexpr int kMostTiles = 16 * 1024 / static_cast<int>(tile_bytes(F));
  constexpr int kSegmentTiles = static_cast<int>(segment_inputs(F) / kTileInputs);
  const int rank = static_cast<int>(blockIdx.x) % plan.cluster;
  const int begin = plan.begin(shape.segments, rank) * kSegmentTiles;
  const int end = min(plan.begin(shape.segments, rank + 1) * kSegmentTiles, shape.k_tiles);
  const int tiles = min(end - begin, kMostTiles);
  if (static_cast<int>(threadIdx.x) % (32 * plan.k_warps) != 0 || tiles <= 0) {
    return;
  }
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    const TileRow first = rows[m].template at_tile<F>(begin);
    ptx::prefetch_to_l2(first.elements, static_cast<unsigned>(tiles * tile_bytes(F)));
    if constexpr (tile_scale_bytes(F) > 0) {
      ptx::prefetch_to_l2(first.scales, static_cast<unsigned>(tiles * tile_scale_bytes(F)));
    }
  }
}

/// The calling warp's segments of its CTA's: sums to partial[m * slots + number of the segment in
/// the CTA], the accumulators of all lanes in order.
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
    float scale[kBlocks];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      scale[m] = F == WeightFormat::kFp8Block
                     ? reinterpret_cast<const float*>(rows[m].scales)[segment]
                     : 1.0F;
    }
    stream_segment<F, kBlocks, kLoad>(acc, rows, inputs, segment * kSegmentTiles, shape.k_tiles,
                                      lane);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      partial[(m * plan.slots + segment - begin) * 32 + lane] = make_float4(
          acc[m][0] * scale[m], acc[m][1] * scale[m], acc[m][2] * scale[m], acc[m][3] * scale[m]);
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

/// One element's sum over all segments, in rising order; `base` is a CTA's first partial. All CTAs
/// of the cluster have passed a barrier since writing.
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
