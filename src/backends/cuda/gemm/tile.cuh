// tile.cuh — products with packed weights for many token rows: a CTA computes a tile of
// outputs x tokens, weights and activations go through shared memory. Shared by linear layers and
// experts.
// Schedule  stages of one tile (64 inputs), filled by cp.async that runs `stages - 1` ahead; one
//           barrier a stage. Weights lie in shared memory as in memory, as fragments; activations
//           (bf16) as rows of 128 bytes whose 16-byte chunks are permuted by row % 8, so that
//           ldmatrix meets no bank twice.
// Numerics  as stream.cuh: a chain of mma a segment, segments added in rising order in fp32.
#pragma once

#include "backends/cuda/gemm/dequant.cuh"
#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/ptx/ldmatrix.cuh"

namespace tandem::cuda {

inline constexpr int kRowBytes = 2 * static_cast<int>(kTileInputs);  // a token's inputs of a stage

template <TileVariant V>
using Accumulators = float[V.blocks][V.columns][4];

/// The inputs of a CTA's tokens, bf16. `rows`: those a thread copies, every threads / 8-th token
/// from threadIdx.x / 8 on. Zero from input `in` on.
template <TileVariant V>
struct TileInputs {
  static constexpr int kRows = V.tokens() * 8 / V.threads();
  static_assert(kRows * V.threads() == V.tokens() * 8);
  const std::uint16_t* rows[kRows];
  int in;

  static __device__ __forceinline__ int token(int i) {
    return static_cast<int>(threadIdx.x) / 8 + i * (V.threads() / 8);
  }

  __device__ __forceinline__ void copy(std::uint8_t* stage, int tile) const {
    const int chunk = static_cast<int>(threadIdx.x) % 8;
    const int k = tile * static_cast<int>(kTileInputs) + chunk * 8;
    const int bytes = min(max((in - k) * 2, 0), 16);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int n = token(i);
      ptx::cp_async_16(stage + n * kRowBytes + (chunk ^ (n % 8)) * 16,
                       rows[i] + (bytes > 0 ? k : 0), bytes);
    }
  }
};

/// Copies tile `tile` of the CTA's blocks and their scales; row(r) is its r-th block.
template <WeightFormat F, TileVariant V, typename Row>
__device__ __forceinline__ void copy_weights(std::uint8_t* stage, const Row& row,
                                             std::int64_t tile) {
  constexpr int kChunks = static_cast<int>(tile_bytes(F)) / 16;
  constexpr int kCopies = V.row_blocks() * kChunks / V.threads();
  static_assert(kCopies * V.threads() == V.row_blocks() * kChunks);
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * V.threads();
    ptx::cp_async_16(stage + index * 16,
                     row(index / kChunks).elements + tile * tile_bytes(F) + index % kChunks * 16);
  }
  constexpr int kScaleChunks = static_cast<int>(tile_scale_bytes(F)) / 16;
  if constexpr (kScaleChunks > 0) {
    static_assert(V.row_blocks() * kScaleChunks <= V.threads());
    const int index = static_cast<int>(threadIdx.x);
    if (index < V.row_blocks() * kScaleChunks) {
      ptx::cp_async_16(stage + V.row_blocks() * tile_bytes(F) + index * 16,
                       row(index / kScaleChunks).scales + tile * tile_scale_bytes(F) +
                           index % kScaleChunks * 16);
    }
  }
}

/// acc += the product of the calling warp's blocks and tokens over a stage.
template <WeightFormat F, TileVariant V>
__device__ __forceinline__ void multiply_stage(Accumulators<V>& acc, const std::uint8_t* stage) {
  static_assert(V.columns % 2 == 0);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int first_block = warp / V.token_warps * V.blocks;
  const std::uint8_t* scale_records = stage + V.row_blocks() * tile_bytes(F);
  RawTile<F> raw[V.blocks];
  TileScales scales[V.blocks];
#pragma unroll
  for (int m = 0; m < V.blocks; ++m) {
    RawScales<F> codes;
    load_shared_tile(raw[m], codes, stage + (first_block + m) * tile_bytes(F),
                     scale_records + (first_block + m) * tile_scale_bytes(F), lane);
    scales[m] = decode_scales(codes);
  }
  // ldmatrix: lanes 0-7 and 8-15 address the two halves of a step of one column of 8 tokens, lanes
  // 16-31 of the next column.
  const int token = warp % V.token_warps * V.columns * 8 + lane / 16 * 8 + lane % 8;
  const std::uint8_t* tokens = stage + V.weight_bytes(F) + token * kRowBytes;
  each_step([&](auto step) {
    const int chunk = ((step.value * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
    std::uint32_t a[V.blocks][4];
#pragma unroll
    for (int m = 0; m < V.blocks; ++m) {
      a_fragment<F, step.value>(a[m], raw[m], scales[m]);
    }
#pragma unroll
    for (int n = 0; n < V.columns; n += 2) {
      std::uint32_t both[4];
      ptx::ldmatrix_x4(both, tokens + n * 8 * kRowBytes + chunk);
      const std::uint32_t b0[2] = {both[0], both[1]};
      const std::uint32_t b1[2] = {both[2], both[3]};
#pragma unroll
      for (int m = 0; m < V.blocks; ++m) {
        ptx::mma_m16n8k16_bf16(acc[m][n], a[m], b0);
        ptx::mma_m16n8k16_bf16(acc[m][n + 1], a[m], b1);
      }
    }
  });
}

/// A segment's block scales of the calling warp's blocks; row(r) as above. Ones but for FP8.
template <WeightFormat F, TileVariant V>
struct SegmentScales {
  float of[V.blocks];

  template <typename Row>
  __device__ __forceinline__ SegmentScales(const Row& row, int segment) {
    const int first_block = static_cast<int>(threadIdx.x / 32) / V.token_warps * V.blocks;
#pragma unroll
    for (int m = 0; m < V.blocks; ++m) {
      of[m] = F == WeightFormat::kFp8Block
                  ? reinterpret_cast<const float*>(row(first_block + m).scales)[segment]
                  : 1.0F;
    }
  }

  __device__ __forceinline__ void multiply(Accumulators<V>& acc) const {
    if constexpr (F == WeightFormat::kFp8Block) {
#pragma unroll
      for (int m = 0; m < V.blocks; ++m) {
#pragma unroll
        for (int n = 0; n < V.columns; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            acc[m][n][i] *= of[m];
          }
        }
      }
    }
  }
};

/// Segments [begin, end) of a CTA's tile; done(segment, acc) after each, with its sums.
template <WeightFormat F, TileVariant V, typename Row, typename Done>
__device__ __forceinline__ void multiply_segments(std::uint8_t* smem, const Row& row,
                                                  const TileInputs<V>& inputs,
                                                  const TensorShape& shape, int begin, int end,
                                                  const Done& done) {
  constexpr int kSegmentTiles = static_cast<int>(segment_inputs(F) / kTileInputs);
  int tile = begin * kSegmentTiles;
  const int tiles_end = min(end * kSegmentTiles, shape.k_tiles);
  const auto copy = [&](int to_slot, int from_tile) {
    std::uint8_t* stage = smem + to_slot * V.stage_bytes(F);
    if (from_tile < tiles_end) {
      copy_weights<F, V>(stage, row, from_tile);
      inputs.copy(stage + V.weight_bytes(F), from_tile);
    }
    ptx::cp_async_commit();  // an empty group where there is no tile: the count below stays right
  };
  for (int i = 0; i < V.stages - 1; ++i) {
    copy(i, tile + i);
  }
  int slot = 0;
  for (int segment = begin; segment < end; ++segment) {
    const SegmentScales<F, V> scales(row, segment);
    Accumulators<V> acc = {};
    const int segment_end = min((segment + 1) * kSegmentTiles, tiles_end);
    for (; tile < segment_end; ++tile) {
      ptx::cp_async_wait<V.stages - 2>();
      __syncthreads();  // everybody's copies of this tile are there; the tile before is read
      copy(slot == 0 ? V.stages - 1 : slot - 1, tile + V.stages - 1);
      multiply_stage<F, V>(acc, smem + slot * V.stage_bytes(F));
      slot = slot + 1 == V.stages ? 0 : slot + 1;
    }
    scales.multiply(acc);
    done(segment, acc);
  }
}

template <TileVariant V>
__device__ __forceinline__ void add_segment(Accumulators<V>& total, const Accumulators<V>& acc) {
#pragma unroll
  for (int m = 0; m < V.blocks; ++m) {
#pragma unroll
    for (int n = 0; n < V.columns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[m][n][i] += acc[m][n][i];
      }
    }
  }
}

/// Where the calling thread's accumulator i of column n of block m lies in the CTA's tile.
struct TileElement {
  int output;
  int token;
};
template <TileVariant V>
__device__ __forceinline__ TileElement tile_element(int m, int n, int i) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  return {(warp / V.token_warps * V.blocks + m) * 16 + lane / 4 + i / 2 * 8,
          (warp % V.token_warps * V.columns + n) * 8 + lane % 4 * 2 + i % 2};
}

}  // namespace tandem::cuda
