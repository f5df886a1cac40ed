// weight_reader.cuh — single elements of a weight in the tiles of gemm/layout.h, in two steps:
// what is stored (fetch), which a kernel may hold in registers while it waits for memory, and its
// fp32 value (value), by the definitions of tensor/quant.h.
#pragma once

#include <cstdint>

#include "backends/cuda/gemm/layout.h"

namespace tandem::cuda {

/// Sizes and offsets of a weight; all weights of a launch share them.
struct WeightShape {
  std::int64_t out;
  std::int64_t in;
  std::int64_t k_tiles;
  std::int64_t scales;   // offset, bytes
  std::int64_t scale_2;  // offset, bytes

  static WeightShape of(const PackedWeight& w) {
    return {w.out, w.in, tiles_of(w.in, kTileInputs), scales_offset(w.format, w.out, w.in),
            scale_2_offset(w.format, w.out, w.in)};
  }
};

inline constexpr std::int64_t kFp8Extent = 128;  // of a block that shares a scale

/// An element's tile, and where in it.
struct TilePlace {
  std::int64_t tile;
  int row;    // 0 .. 15
  int input;  // 0 .. 63

  __device__ TilePlace(const WeightShape& shape, std::int64_t n, std::int64_t k)
      : tile(n / kTileRows * shape.k_tiles + k / kTileInputs),
        row(static_cast<int>(n % kTileRows)),
        input(static_cast<int>(k % kTileInputs)) {}
};

/// E2M1 of the low 4 bits: as exponent and fraction of a float they are 2^126 too small, and the
/// subnormals come out right as well.
__device__ __forceinline__ float e2m1_value(unsigned code) {
  const float magnitude = __uint_as_float((code & 7U) << 22) * 0x1p126F;
  return __uint_as_float(__float_as_uint(magnitude) | (code & 8U) << 28);
}

/// 2^(code - 127); 255 is NaN.
__device__ __forceinline__ float e8m0_value(unsigned code) {
  const unsigned bits = code == 0 ? 0x00400000U : code << 23;
  return __uint_as_float(code == 255 ? 0x7FC00000U : bits);
}

/// E4M3 (the "fn" kind), decoded like E2M1: 2^120 too small at first. S.1111.111 is NaN.
__device__ __forceinline__ float e4m3_value(unsigned code) {
  const float magnitude = __uint_as_float((code & 0x7FU) << 20) * 0x1p120F;
  const unsigned bits = (code & 0x7FU) == 0x7FU ? 0x7FC00000U : __float_as_uint(magnitude);
  return __uint_as_float(bits | (code & 0x80U) << 24);
}

template <WeightFormat kFormat>
struct WeightReader;

template <>
struct WeightReader<WeightFormat::kBF16> {
  using Raw = std::uint16_t;
  const std::uint16_t* data;
  const WeightShape& shape;

  __device__ WeightReader(const std::uint8_t* weight, const WeightShape& of)
      : data(reinterpret_cast<const std::uint16_t*>(weight)), shape(of) {}
  __device__ Raw fetch(std::int64_t n, std::int64_t k) const {
    const TilePlace at(shape, n, k);
    return data[at.tile * (kTileRows * kTileInputs) + place_in_tile(at.row, at.input)];
  }
  __device__ float value(Raw raw) const { return __uint_as_float(unsigned{raw} << 16); }
};

template <>
struct WeightReader<WeightFormat::kFp8Block> {
  struct Raw {
    float scale;
    std::uint8_t code;
  };
  const std::uint8_t* data;
  const float* scales;
  const WeightShape& shape;

  __device__ WeightReader(const std::uint8_t* weight, const WeightShape& of)
      : data(weight), scales(reinterpret_cast<const float*>(weight + of.scales)), shape(of) {}
  __device__ Raw fetch(std::int64_t n, std::int64_t k) const {
    const TilePlace at(shape, n, k);
    // [step / 2][lane] of two steps' 8 bytes; place counts [step][lane].
    const int place = place_in_tile(at.row, at.input);
    const int step = place / 256;
    const int lane = place / 8 % 32;
    const int byte = step / 2 * 512 + lane * 16 + step % 2 * 8 + place % 8;
    const std::int64_t blocks = tiles_of(shape.in, kFp8Extent);
    return {scales[n / kFp8Extent * blocks + k / kFp8Extent],
            data[at.tile * tile_bytes(WeightFormat::kFp8Block) + byte]};
  }
  __device__ float value(Raw raw) const { return e4m3_value(raw.code) * raw.scale; }
};

/// The code of an FP4 element, in the low 4 bits.
__device__ __forceinline__ std::uint8_t fp4_code(const std::uint8_t* data, const TilePlace& at) {
  const int place = place_in_tile(at.row, at.input);
  const int step = place / 256;
  const int lane = place / 8 % 32;
  const auto* words = reinterpret_cast<const std::uint32_t*>(data + at.tile * 512);
  return static_cast<std::uint8_t>(fp4_code(words[lane * 4 + step], place % 8));
}

struct Fp4Raw {
  std::uint8_t code;
  std::uint8_t scale;
};

template <>
struct WeightReader<WeightFormat::kMxFp4> {
  using Raw = Fp4Raw;
  const std::uint8_t* data;
  const WeightShape& shape;

  __device__ WeightReader(const std::uint8_t* weight, const WeightShape& of)
      : data(weight), shape(of) {}
  __device__ Raw fetch(std::int64_t n, std::int64_t k) const {
    const TilePlace at(shape, n, k);
    const int scale = at.row % 8 * 4 + at.row / 8 * 2 + at.input / 32;
    return {fp4_code(data, at), data[shape.scales + at.tile * 32 + scale]};
  }
  __device__ float value(Raw raw) const { return e2m1_value(raw.code) * e8m0_value(raw.scale); }
};

template <>
struct WeightReader<WeightFormat::kNvFp4> {
  using Raw = Fp4Raw;
  const std::uint8_t* data;
  const WeightShape& shape;
  float scale_2;

  __device__ WeightReader(const std::uint8_t* weight, const WeightShape& of)
      : data(weight), shape(of), scale_2(*reinterpret_cast<const float*>(weight + of.scale_2)) {}
  __device__ Raw fetch(std::int64_t n, std::int64_t k) const {
    const TilePlace at(shape, n, k);
    const int scale = at.row % 8 * 8 + at.row / 8 * 4 + at.input / 16;
    return {fp4_code(data, at), data[shape.scales + at.tile * 64 + scale]};
  }
  __device__ float value(Raw raw) const {
    return e2m1_value(raw.code) * (e4m3_value(raw.scale) * scale_2);
  }
};

}  // namespace tandem::cuda
