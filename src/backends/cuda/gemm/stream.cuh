// stream.cuh — the decode path of products with packed weights: at most 8 token rows, weights go
// straight from memory to registers, once. Shared by linear layers and experts.
// Schedule  A warp owns kBlocks blocks of 16 outputs and every k_warps-th segment of the inputs
//           (layout.h). It loads kLoad tiles of each block at once and then multiplies; nothing but
//           other warps hides its latency, so a CTA has no barrier before the last sum.
// Sum       Segments' sums go to shared memory of the CTA that adds them, in rising order; where
//           the inputs are split over the CTAs of a cluster, each of these adds some outputs.
// Numerics  activations rounded to bf16; fp32 sums; the order of layout.h, so that neither the
//           number of rows nor warps nor CTAs change a bit.
#pragma once

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/gemm/dequant.cuh"
#include "backends/cuda/gemm/multiply_tile.cuh"
#include "backends/cuda/gemm/plan.h"
#include "backends/cuda/ptx/cluster.cuh"

namespace tandem::cuda {

template <WeightFormat F>
inline constexpr int kSegmentTiles = static_cast<int>(segment_inputs(F) / kTileInputs);

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

/// A lane's part of up to kLoad tiles of each block, in registers.
template <WeightFormat F, int kBlocks, int kLoad>
struct StreamPiece {
  static_assert(kLoad <= 4);  // a lane of each four decodes one tile's scales
  RawTile<F> raw[kLoad][kBlocks];
  RawScales<F> codes[kBlocks];

  /// Tiles from `tile` on, of which `count` exist, at least one.
  __device__ __forceinline__ void load(const TileRow (&rows)[kBlocks], int tile, int count,
                                       int lane) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      const TileRow first = rows[m].template at_tile<F>(tile);
      load_scales(codes[m], first, min(count, kLoad), lane);
#pragma unroll
      for (int i = 0; i < kLoad; ++i) {
        if (i < count) {
          load_tile(raw[i][m], first, i, lane);
        }
      }
    }
    __syncwarp();  // ptxas moves no load over it: all are under way before the first is needed
  }

  /// acc += the product with them: one chain of mma.
  template <typename Inputs>
  __device__ __forceinline__ void multiply(float (&acc)[kBlocks][4], const Inputs& inputs, int tile,
                                           int count) const {
    TileScales scales[kBlocks];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      scales[m] = decode_scales(codes[m]);
    }
    const auto with_tile = [&](int i) {
      std::uint32_t b[kStepsPerTile][2];
#pragma unroll
      for (int step = 0; step < kStepsPerTile; ++step) {
        inputs.load(b[step], (tile + i) * static_cast<int>(kTileInputs) + step * 16);
      }
      multiply_tile<F>(acc, raw[i], scales, i, b);
    };
    if (count >= kLoad) {
#pragma unroll
      for (int i = 0; i < kLoad; ++i) {
        with_tile(i);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kLoad - 1; ++i) {
      if (i < count) {
        with_tile(i);
      }
    }
  }
};

/// A warp's segments of the inputs: first, first + step, ... below end.
struct WarpSegments {
  int first;
  int end;
  int step;
};

/// keep(segment, sums of the lane) of each. `loaded`: whether `piece` already holds the first
/// one's first tiles; afterwards it does not.
template <WeightFormat F, int kBlocks, int kLoad, typename Inputs, typename Keep>
__device__ __forceinline__ void stream_segments(StreamPiece<F, kBlocks, kLoad>& piece,
                                                const TileRow (&rows)[kBlocks],
                                                const Inputs& inputs, int k_tiles,
                                                const WarpSegments& mine, bool& loaded,
                                                const Keep& keep) {
  static_assert(kSegmentTiles<F> % kLoad == 0);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int segment = mine.first; segment < mine.end; segment += mine.step) {
    float scale[kBlocks];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      scale[m] = F == WeightFormat::kFp8Block
                     ? reinterpret_cast<const float*>(rows[m].scales)[segment]
                     : 1.0F;
    }
    float acc[kBlocks][4] = {};
#pragma unroll
    for (int i = 0; i < kSegmentTiles<F>; i += kLoad) {
      const int tile = segment * kSegmentTiles<F> + i;
      if (i > 0 && tile >= k_tiles) {
        break;
      }
      if (!loaded) {
        piece.load(rows, tile, k_tiles - tile, lane);
      }
      loaded = false;
      piece.multiply(acc, inputs, tile, k_tiles - tile);
    }
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[m][i] *= scale[m];
      }
    }
    keep(segment, acc);
  }
}

/// Segments' sums in the shared memory of the CTA that adds them: [segment][token][part][output].
/// Of each part of the work (one, or a layer and its gate) a CTA of the cluster adds `outputs`.
class SegmentSums {
 public:
  int outputs;  // a power of two

  __device__ __forceinline__ SegmentSums(float* smem, const StreamPlan& plan, int blocks, int parts)
      : outputs(plan.outputs(blocks) / parts),
        base_(smem),
        step_(plan.outputs(blocks) + kStreamSumPadding),
        tokens_(plan.tokens),
        cluster_(plan.cluster) {
    log2_outputs_ = 31 - __clz(outputs);
    if (cluster_ > 1) {
      ptx::cluster_arrive();
    }
  }

  /// The other CTAs have begun, so that their shared memory can be written. Once, before put().
  __device__ __forceinline__ void wait_for_peers() const {
    if (cluster_ > 1) {
      ptx::cluster_wait();
    }
  }
  /// The accumulators of a lane for 16 outputs, `output` the first of them among the cluster's.
  __device__ __forceinline__ void put(int segment, int part, int output, const float (&acc)[4],
                                      int lane) const {
    const int token = lane % 4 * 2;
    if (token >= tokens_) {
      return;
    }
    float* at = base_ + (segment * tokens_ + token) * step_ + part * outputs;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = output + lane / 4 + half * 8;
      float* to = at + (row & (outputs - 1));
      if (cluster_ > 1) {
        const auto rank = static_cast<unsigned>(row >> log2_outputs_);
        ptx::store_to_rank(to, rank, acc[half * 2]);
        ptx::store_to_rank(to + step_, rank, acc[half * 2 + 1]);
      } else {
        to[0] = acc[half * 2];
        to[step_] = acc[half * 2 + 1];
      }
    }
  }
  /// Every segment's sum is there.
  __device__ __forceinline__ void meet() const {
    if (cluster_ > 1) {
      ptx::cluster_arrive_release();
      ptx::cluster_wait();
    } else {
      __syncthreads();
    }
  }
  /// The sum over segments [begin, end) of one of the CTA's outputs, in rising order.
  __device__ __forceinline__ float total(int part, int output, int token, int begin,
                                         int end) const {
    const float* from = base_ + token * step_ + part * outputs + output;
    float sum = 0.0F;
#pragma unroll 4
    for (int segment = begin; segment < end; ++segment) {
      sum += from[segment * tokens_ * step_];
    }
    return sum;
  }
  /// fn(token, output) of the calling thread's share of the CTA's outputs.
  template <typename Fn>
  __device__ __forceinline__ void each(int tokens, const Fn& fn) const {
    for (int i = static_cast<int>(threadIdx.x); i < outputs * tokens;
         i += static_cast<int>(blockDim.x)) {
      fn(i >> log2_outputs_, i & (outputs - 1));
    }
  }

 private:
  float* base_;  // at the same place in every CTA of the cluster
  int step_;     // of a token; four more than its sums, so that two tokens meet in no bank
  int tokens_;
  int log2_outputs_;
  int cluster_;
};

}  // namespace tandem::cuda
