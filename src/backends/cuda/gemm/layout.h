// layout.h — how the CUDA backend keeps a weight [out, in]. Shared by linear layers and experts.
//
// F32 is row-major [out, in]. Every other format is cut into tiles of 16 outputs by 64 inputs,
// tiles of a row block adjacent: tile (i, j) is number i * num_k_tiles + j. In a tile the elements
// lie in the order in which the lanes of a warp want them as the A operand (16 x 16, row-major) of
// mma.m16n8k16, so that one 16-byte load a lane is coalesced and needs no shuffle. Step s = 0..3
// covers inputs 16 s .. 16 s + 15 of the tile. Lane (g = lane / 4, t = lane % 4) holds of a step
//     a0 a1: row g,     inputs 2t, 2t+1        a4 a5: row g,     inputs 2t+8, 2t+9
//     a2 a3: row g + 8, inputs 2t, 2t+1        a6 a7: row g + 8, inputs 2t+8, 2t+9
// BF16    2,048 bytes a tile: [step][lane] of a0 .. a7
// FP8     1,024 bytes a tile: [step / 2][lane] of two steps' a0 .. a7, one byte each
// FP4       512 bytes a tile: [lane] of four steps, one 32-bit word each; a code's bits lie where
//           one shift and one mask move two codes to the places that bf16 has for them (fp4_word)
// Scales of FP4, one record a tile: NVFP4 64 bytes, [g] of row g's four e4m3 codes, then row g +
// 8's; MXFP4 32 bytes, [g] of row g's two e8m0 codes, then row g + 8's. Of FP8: fp32, as in the
// checkpoint. Rows and inputs beyond the weight's are zeros.
//
// All of it is one buffer, PackedWeight::data: elements, scales, and at the end scale_2 as fp32
// (PackedWeight::scales stays empty), so that one pointer is all a kernel needs of an expert.
#pragma once

#include <cstdint>

#include "ops/gemm.h"

namespace tandem::cuda {

inline constexpr std::int64_t kTileRows = 16;
inline constexpr std::int64_t kTileInputs = 64;

[[nodiscard]] constexpr std::int64_t tiles_of(std::int64_t extent, std::int64_t tile) {
  return (extent + tile - 1) / tile;
}

/// Bytes of one tile's elements; 0 for F32, which has no tiles.
[[nodiscard]] constexpr std::int64_t tile_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return 0;
    case WeightFormat::kBF16:
      return 2048;
    case WeightFormat::kFp8Block:
      return 1024;
    case WeightFormat::kMxFp4:
    case WeightFormat::kNvFp4:
      return 512;
  }
  return 0;
}

/// Bytes of one tile's scales; 0 where scales are not kept by tile.
[[nodiscard]] constexpr std::int64_t tile_scale_bytes(WeightFormat format) {
  return format == WeightFormat::kNvFp4 ? 64 : format == WeightFormat::kMxFp4 ? 32 : 0;
}

/// Bytes from the start of PackedWeight::data.
[[nodiscard]] constexpr std::int64_t scales_offset(WeightFormat format, std::int64_t out,
                                                   std::int64_t in) {
  const std::int64_t tiles = tiles_of(out, kTileRows) * tiles_of(in, kTileInputs);
  return format == WeightFormat::kF32 ? out * in * 4 : tiles * tile_bytes(format);
}
[[nodiscard]] constexpr std::int64_t scale_2_offset(WeightFormat format, std::int64_t out,
                                                    std::int64_t in) {
  const std::int64_t tiles = tiles_of(out, kTileRows) * tiles_of(in, kTileInputs);
  const std::int64_t scales = format == WeightFormat::kFp8Block
                                  ? tiles_of(out, 128) * tiles_of(in, 128) * 4
                                  : tiles * tile_scale_bytes(format);
  return scales_offset(format, out, in) + scales;
}

/// Element (row, input) of a tile: which of its 1,024 places in the order above, counting a step's
/// 8 elements of a lane as adjacent: place = (step * 32 + lane) * 8 + index of a.
[[nodiscard]] constexpr int place_in_tile(int row, int input) {
  const int step = input / 16;
  const int in_step = input % 16;
  const int lane = (row % 8) * 4 + (in_step % 8) / 2;
  const int index = (in_step / 8) * 4 + (row / 8) * 2 + in_step % 2;
  return (step * 32 + lane) * 8 + index;
}

/// FP4 code `code` as element a(index) of a step's word, other bits 0. A code's magnitude belongs
/// at bits 8 .. 6 of a bf16 and its sign at bit 15. Of the pairs a(2r), a(2r + 1), in the low and
/// the high half: r = 0 is there after a shift to the left by 6, 1 after one by 2, 2 after a
/// rotation to the right by 4; of 3 only the lowest bit must move, to the right by 8.
[[nodiscard]] constexpr std::uint32_t fp4_word(std::uint32_t code, int index) {
  const std::uint32_t magnitude = code & 7U;
  const std::uint32_t sign = code >> 3 & 1U;
  const int half = index % 2 * 16;
  switch (index / 2) {
    case 0:
      return (magnitude | sign << 9) << half;
    case 1:
      return (magnitude << 4 | sign << 13) << half;
    case 2:
      return magnitude << (10 + half) | sign << (19 - half);
    default:
      return ((magnitude & 1U) << 14 | magnitude >> 1 << 7 | sign << 15) << half;
  }
}
/// Element a(index) of such a word.
[[nodiscard]] constexpr std::uint32_t fp4_code(std::uint32_t word, int index) {
  const int half = index % 2 * 16;
  const std::uint32_t own = word >> half;
  switch (index / 2) {
    case 0:
      return (own & 7U) | (own >> 9 & 1U) << 3;
    case 1:
      return (own >> 4 & 7U) | (own >> 13 & 1U) << 3;
    case 2:
      return (own >> 10 & 7U) | (word >> (19 - half) & 1U) << 3;
    default:
      return (own >> 14 & 1U) | (own >> 7 & 3U) << 1 | (own >> 15 & 1U) << 3;
  }
}

/// Tensor-core products are summed over this many inputs by one chain of mma instructions, and the
/// sums of these segments are added in rising order in fp32: the same law for every kernel, so that
/// a row's result does not depend on which kernel computed it.
[[nodiscard]] constexpr std::int64_t segment_inputs(WeightFormat format) {
  return format == WeightFormat::kFp8Block ? 128 : 256;
}

}  // namespace tandem::cuda
