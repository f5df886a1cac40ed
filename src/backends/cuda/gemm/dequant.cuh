// dequant.cuh — a tile of gemm/layout.h as A fragments of mma.m16n8k16, exact.
// BF16    as stored.
// FP8     sign and magnitude moved to a bf16's places, 2^-120 too small, times 2^120. The block
//         scale (fp32) is for the caller, after the multiplication. Codes of NaN are not decoded.
// FP4     a shift and a mask put the sign at bit 15 and the magnitude at bits 8 .. 6, where bf16
// has
//         its exponent's two low bits and its first fraction bit (fp4_word): code * 2^-126, the
//         code of 0.5 as a subnormal.
// NVFP4   times the block scale times 2^119: code * scale * 2^-7, so that one multiplication a
// weight
//         does; the sum is multiplied by 2^7 with scale_2 (sum_factor). At most 6 significant bits.
// MXFP4   times 2^126, then times the block scale: over e8m0's range no single factor would do.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/gemm/plan.h"
#include "backends/cuda/ptx/memory.cuh"
#include "backends/cuda/ptx/mma.cuh"

namespace tandem::cuda {

inline constexpr int kStepsPerTile = 4;

/// One lane's part of a tile's elements as loaded.
template <WeightFormat F>
struct RawTile {
  static constexpr int kWords = static_cast<int>(tile_bytes(F)) / 512;
  uint4 words[kWords];
};

/// Scale codes of rows g and g + 8 in one tile, as loaded; empty where tiles have none.
template <WeightFormat F>
struct RawScales {
  static constexpr int kWords = static_cast<int>(tile_scale_bytes(F)) / 32;
  std::uint32_t words[kWords > 0 ? kWords : 1];
};

/// Where a block of 16 outputs lies.
struct TileRow {
  const std::uint8_t* elements = nullptr;  // its first tile
  const std::uint8_t* scales = nullptr;  // FP4: its first record; FP8: fp32 scales along the inputs

  /// The same from a tile on. The offsets are 32-bit and the bases opaque, or the compiler works
  /// out every address from the start, in 64 bits.
  template <WeightFormat F>
  __device__ __forceinline__ TileRow at_tile(int tile) const {
    return {elements + static_cast<unsigned>(tile) * static_cast<unsigned>(tile_bytes(F)),
            scales + static_cast<unsigned>(tile) * static_cast<unsigned>(tile_scale_bytes(F))};
  }
};

/// Block `block` of 16 outputs of a weight packed at `data`; the last one where there are no more.
template <WeightFormat F>
__device__ __forceinline__ TileRow tile_row(const std::uint8_t* data, const TensorShape& shape,
                                            std::int64_t block) {
  block = min(block, static_cast<std::int64_t>(shape.row_blocks - 1));
  const std::uint8_t* scales = data + shape.scales_offset;
  if constexpr (F == WeightFormat::kFp8Block) {
    scales += block / 8 * shape.segments * 4;  // 128 x 128 blocks: a segment is a block wide
  } else {
    scales += block * shape.k_tiles * tile_scale_bytes(F);
  }
  return {ptx::opaque(data + block * shape.k_tiles * tile_bytes(F)), ptx::opaque(scales)};
}

/// Elements of the tile that is `tile` after a row's first, from global memory.
template <WeightFormat F>
__device__ __forceinline__ void load_tile(RawTile<F>& raw, const TileRow& row, int tile, int lane) {
#pragma unroll
  for (int i = 0; i < RawTile<F>::kWords; ++i) {
    raw.words[i] =
        ptx::load_streaming_16(row.elements + lane * 16 + (tile * tile_bytes(F) + i * 512));
  }
}

/// Scale codes of a row's tile t = lane % 4, or of tile `tiles` - 1 where there are fewer.
template <WeightFormat F>
__device__ __forceinline__ void load_scales(RawScales<F>& raw, const TileRow& row, int tiles,
                                            int lane) {
  const std::uint8_t* from = row.scales + min(lane % 4, tiles - 1) * tile_scale_bytes(F);
  if constexpr (F == WeightFormat::kNvFp4) {
    const uint2 codes = ptx::load_streaming_8(from + lane / 4 * 8);
    raw.words[0] = codes.x;
    raw.words[1] = codes.y;
  } else if constexpr (F == WeightFormat::kMxFp4) {
    raw.words[0] = ptx::load_streaming_4(from + lane / 4 * 4);
  }
}

/// A tile and its scales copied to shared memory.
template <WeightFormat F>
__device__ __forceinline__ void load_shared_tile(RawTile<F>& tile, RawScales<F>& codes,
                                                 const std::uint8_t* elements,
                                                 const std::uint8_t* scales, int lane) {
#pragma unroll
  for (int i = 0; i < RawTile<F>::kWords; ++i) {
    tile.words[i] = *reinterpret_cast<const uint4*>(elements + (i * 32 + lane) * 16);
  }
#pragma unroll
  for (int i = 0; i < RawScales<F>::kWords; ++i) {
    codes.words[i] =
        *reinterpret_cast<const std::uint32_t*>(scales + (lane / 4 * RawScales<F>::kWords + i) * 4);
  }
}

/// Block scales of a tile as bf16 pairs. NVFP4: pair[2 * (row g or g + 8) + step % 2], half step
/// / 2. MXFP4: pair[step / 2], half 0 for row g and half 1 for row g + 8.
struct TileScales {
  std::uint32_t pair[4];
};

template <WeightFormat F>
__device__ __forceinline__ TileScales decode_scales(const RawScales<F>& raw) {
  TileScales s{};
  if constexpr (F == WeightFormat::kNvFp4) {
    constexpr std::uint32_t kTwoTo120 = 0x7B807B80U;
    constexpr std::uint32_t kTwoTo119 = 0x7B007B00U;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // As FP8 below: codes 0 and 2, then 1 and 3 of a row.
      const std::uint32_t u = raw.words[i];
      const std::uint32_t even = ((u << 8) & 0x80008000U) | ((u << 4) & 0x07F007F0U);
      const std::uint32_t odd = (u & 0x80008000U) | ((u >> 4) & 0x07F007F0U);
      s.pair[2 * i] = ptx::mul_bf16x2(ptx::mul_bf16x2(even, kTwoTo120), kTwoTo119);
      s.pair[2 * i + 1] = ptx::mul_bf16x2(ptx::mul_bf16x2(odd, kTwoTo120), kTwoTo119);
    }
  } else if constexpr (F == WeightFormat::kMxFp4) {
    // 2^(code - 127) has the code as its exponent field, but for code 0: the subnormal 0x0040.
    const std::uint32_t u = raw.words[0];
    s.pair[0] = __vmaxu2((u << 7) & 0x7F807F80U, 0x00400040U);
    s.pair[1] = __vmaxu2((u >> 1) & 0x7F807F80U, 0x00400040U);
  }
  return s;
}

/// Of decoded scales where lane t has tile t's: those of tile `tile`.
template <WeightFormat F>
__device__ __forceinline__ TileScales scales_of_tile(const TileScales& by_lane, int tile) {
  constexpr int kPairs = F == WeightFormat::kNvFp4 ? 4 : F == WeightFormat::kMxFp4 ? 2 : 0;
  TileScales s{};
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    s.pair[i] = __shfl_sync(0xFFFFFFFFU, by_lane.pair[i], tile, 4);
  }
  return s;
}

template <int kPair>  // bytes 2 kPair and 2 kPair + 1 of `word`
__device__ __forceinline__ std::uint32_t decode_e4m3_pair(std::uint32_t word) {
  constexpr std::uint32_t kTwoTo120 = 0x7B807B80U;
  const std::uint32_t high = __byte_perm(word, 0, kPair == 0 ? 0x1404 : 0x3424);
  const std::uint32_t bits = (high & 0x80008000U) | ((high >> 4) & 0x07F007F0U);
  return ptx::mul_bf16x2(bits, kTwoTo120);
}

template <WeightFormat F, int kStep>
__device__ __forceinline__ std::uint32_t fp4_scaled(std::uint32_t code, const TileScales& s,
                                                    std::integral_constant<int, kStep>,
                                                    bool upper) {
  if constexpr (F == WeightFormat::kNvFp4) {
    return ptx::mul_bf16x2_half<kStep / 2>(code, s.pair[(upper ? 2 : 0) + kStep % 2]);
  } else {
    constexpr std::uint32_t kTwoTo126 = 0x7E807E80U;
    const std::uint32_t value = ptx::mul_bf16x2(code, kTwoTo126);
    return upper ? ptx::mul_bf16x2_half<1>(value, s.pair[kStep / 2])
                 : ptx::mul_bf16x2_half<0>(value, s.pair[kStep / 2]);
  }
}

/// The A fragment of one step.
template <WeightFormat F, int kStep>
__device__ __forceinline__ void a_fragment(std::uint32_t (&a)[4], const RawTile<F>& raw,
                                           const TileScales& scales) {
  if constexpr (F == WeightFormat::kBF16) {
    const uint4& w = raw.words[kStep];
    a[0] = w.x;
    a[1] = w.y;
    a[2] = w.z;
    a[3] = w.w;
  } else if constexpr (F == WeightFormat::kFp8Block) {
    const uint4& w = raw.words[kStep / 2];
    const std::uint32_t low = kStep % 2 == 0 ? w.x : w.z;
    const std::uint32_t high = kStep % 2 == 0 ? w.y : w.w;
    a[0] = decode_e4m3_pair<0>(low);
    a[1] = decode_e4m3_pair<1>(low);
    a[2] = decode_e4m3_pair<0>(high);
    a[3] = decode_e4m3_pair<1>(high);
  } else {
    constexpr std::uint32_t kKept = 0x81C081C0U;
    constexpr std::integral_constant<int, kStep> step{};
    const uint4& v = raw.words[0];
    const std::uint32_t w = kStep == 0 ? v.x : kStep == 1 ? v.y : kStep == 2 ? v.z : v.w;
    a[0] = fp4_scaled<F>((w << 6) & kKept, scales, step, false);
    a[1] = fp4_scaled<F>((w << 2) & kKept, scales, step, true);
    a[2] = fp4_scaled<F>(__funnelshift_r(w, w, 4) & kKept, scales, step, false);
    a[3] = fp4_scaled<F>((w & 0x81808180U) | ((w >> 8) & 0x00400040U), scales, step, true);
  }
}

/// Runs fn(std::integral_constant<int, step>) for the steps of a tile.
template <typename Fn>
__device__ __forceinline__ void each_step(const Fn& fn) {
  fn(std::integral_constant<int, 0>{});
  fn(std::integral_constant<int, 1>{});
  fn(std::integral_constant<int, 2>{});
  fn(std::integral_constant<int, 3>{});
}

/// What the sum over all segments is multiplied by. `scale_2`: in device memory.
template <WeightFormat F>
__device__ __forceinline__ float sum_factor(const std::uint8_t* scale_2) {
  if constexpr (F == WeightFormat::kNvFp4) {
    return *reinterpret_cast<const float*>(scale_2) * 128.0F;
  } else {
    return 1.0F;
  }
}

}  // namespace tandem::cuda
