// plan.h — how a product with packed weights is cut: what choose_*.cpp decide and kernels follow.
#pragma once

#include <cstdint>

#include "backends/cuda/gemm/layout.h"

namespace tandem::cuda {

/// A packed weight as kernels see it: extents in blocks of 16 outputs, tiles and segments of
/// inputs.
struct TensorShape {
  std::int64_t out = 0;
  std::int64_t in = 0;
  int row_blocks = 0;
  int k_tiles = 0;
  int segments = 0;
  std::int64_t scales_offset = 0;
  std::int64_t scale_2_offset = 0;
};

[[nodiscard]] constexpr TensorShape tensor_shape(WeightFormat format, std::int64_t out,
                                                 std::int64_t in) {
  return {.out = out,
          .in = in,
          .row_blocks = static_cast<int>(tiles_of(out, kTileRows)),
          .k_tiles = static_cast<int>(tiles_of(in, kTileInputs)),
          .segments = static_cast<int>(tiles_of(in, segment_inputs(format))),
          .scales_offset = scales_offset(format, out, in),
          .scale_2_offset = scale_2_offset(format, out, in)};
}

/// The segments of CTA `rank` of `cluster` that share an output: [split(.., rank), split(.., rank +
/// 1)).
[[nodiscard]] constexpr int split(int segments, int rank, int cluster) {
  return segments * rank / cluster;
}

/// Bounds of the decode path's kernels: 16 warps an SM, so that a thread has 128 registers, half of
/// them for loads under way.
inline constexpr int kStreamThreads = 256;
inline constexpr int kStreamCtas = 2;

inline constexpr int kStreamTokens = 8;  // of a launch of the decode path, at most
/// Tokens' sums in shared memory are so many floats longer than outputs (stream.cuh).
inline constexpr int kStreamSumPadding = 4;

/// The decode path (stream.cuh): warps of a CTA are row_warps x k_warps.
struct StreamPlan {
  int row_warps = 1;  // a power of two
  int k_warps = 1;
  int cluster = 1;   // CTAs that share an output, each with its part of the inputs; a power of two
  int segments = 1;  // of the longest sum
  int tokens = kStreamTokens;  // whose sums are kept, even

  [[nodiscard]] constexpr int threads() const { return 32 * row_warps * k_warps; }
  [[nodiscard]] constexpr int begin(int of_segments, int rank) const {
    return split(of_segments, rank, cluster);
  }
  /// CTAs, or clusters of them, for so many blocks of 16 outputs, `blocks` of them a warp.
  [[nodiscard]] constexpr std::int64_t groups(int all_blocks, int blocks) const {
    return tiles_of(all_blocks, std::int64_t{row_warps} * blocks);
  }
  /// Outputs that a CTA adds, of `blocks` blocks of 16 a warp.
  [[nodiscard]] constexpr int outputs(int blocks) const {
    return 16 * row_warps * blocks / cluster;
  }
  /// Shared memory for them.
  [[nodiscard]] constexpr std::int64_t smem_bytes(int blocks) const {
    return std::int64_t{4} * segments * tokens * (outputs(blocks) + kStreamSumPadding);
  }
};

/// The most threads of a CTA of the decode path with rings: alone on an SM, a thread has 128
/// registers.
inline constexpr int kRingThreads = 512;

/// Bytes of the barriers before the stages of a CTA's rings, and of a row of inputs behind them:
/// rows begin 64 bytes apart modulo 128, so that two of them meet in no bank.
[[nodiscard]] constexpr int ring_barrier_bytes(int warps, int stages) {
  return (8 * warps * stages + 127) / 128 * 128;
}
[[nodiscard]] constexpr int ring_row_bytes(int k_tiles) {
  return k_tiles * 128 + 64;
}

/// A segment's sums of a block of 16 outputs, two tokens.
inline constexpr int kRingSumBytes = 128;

/// The decode path of FP4 experts (ring.cuh): a CTA's warps share the segments of a unit of some
/// blocks of 16 outputs, one unit after the other.
struct RingPlan {
  int warps = 1;
  int stages = 1;  // of a warp's ring
  int tokens = 1;  // of a work item, at most
  std::int64_t ctas = 1;
  std::int64_t smem_bytes = 0;

  /// Sums are kept for two tokens at a time.
  [[nodiscard]] constexpr int token_pairs() const { return (tokens + 1) / 2; }
};

/// Blocks of 16 outputs that one warp of the decode path computes: packed weights are so small that
/// one block a warp would leave too few bytes under way.
[[nodiscard]] constexpr int stream_blocks(WeightFormat format) {
  return format == WeightFormat::kBF16 ? 1 : 2;
}

/// A tile of the path for many rows (tile.cuh): warps of a CTA are row_warps x token_warps, a warp
/// computes blocks x columns accumulators of 16 outputs x 8 tokens.
struct TileVariant {
  int blocks = 1;
  int columns = 1;
  int row_warps = 1;
  int token_warps = 1;
  int stages = 2;  // tiles of inputs in shared memory
  int ctas = 1;    // on an SM, as far as registers go

  [[nodiscard]] constexpr int row_blocks() const { return blocks * row_warps; }
  [[nodiscard]] constexpr int outputs() const { return 16 * row_blocks(); }
  [[nodiscard]] constexpr int tokens() const { return 8 * columns * token_warps; }
  [[nodiscard]] constexpr int threads() const { return 32 * row_warps * token_warps; }
  [[nodiscard]] constexpr int weight_bytes(WeightFormat format) const {
    return row_blocks() * static_cast<int>(tile_bytes(format) + tile_scale_bytes(format));
  }
  /// One tile of inputs: weights, their scales, and activations in bf16.
  [[nodiscard]] constexpr int stage_bytes(WeightFormat format) const {
    return weight_bytes(format) + tokens() * static_cast<int>(kTileInputs) * 2;
  }
  /// With `slots` segments' sums of a CTA kept beside the stages.
  [[nodiscard]] constexpr std::int64_t smem_bytes(WeightFormat format, int slots) const {
    return std::int64_t{stages} * stage_bytes(format) +
           std::int64_t{slots} * outputs() * tokens() * 4;
  }
};

/// Linear layers: by how many rows there are.
inline constexpr TileVariant kLinearTiles[] = {
    {.blocks = 1, .columns = 2, .row_warps = 4, .token_warps = 1, .stages = 6, .ctas = 3},
    {.blocks = 1, .columns = 4, .row_warps = 4, .token_warps = 1, .stages = 6, .ctas = 3},
    {.blocks = 2, .columns = 4, .row_warps = 2, .token_warps = 2, .stages = 6, .ctas = 3},
    {.blocks = 2, .columns = 8, .row_warps = 4, .token_warps = 2, .stages = 4, .ctas = 1},
};
inline constexpr int kNumLinearTiles = 4;

/// Experts: the two blocks of a warp are gate and up of the same outputs.
inline constexpr TileVariant kExpertTiles[] = {
    {.blocks = 2, .columns = 4, .row_warps = 4, .token_warps = 1, .stages = 5, .ctas = 3},
    {.blocks = 2, .columns = 8, .row_warps = 4, .token_warps = 1, .stages = 4, .ctas = 2},
};
inline constexpr int kNumExpertTiles = 2;

}  // namespace tandem::cuda
