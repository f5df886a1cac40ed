// latent_row.cuh — elements of cached latent rows: reading them as fp32, rounding into them.
// Formats and roundings: tensor/latent_rows.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/quad.cuh"
#include "tensor/latent_rows.h"

namespace tandem::cuda {

/// A row as fp32 values.
template <LatentFormat kFormat>
struct LatentRow {
  const std::byte* at;

  __device__ float operator[](std::int64_t i) const {
    if constexpr (kFormat == LatentFormat::kF32) {
      return reinterpret_cast<const float*>(at)[i];
    } else if constexpr (kFormat == LatentFormat::kBF16) {
      return __uint_as_float(std::uint32_t{reinterpret_cast<const std::uint16_t*>(at)[i]} << 16);
    } else {
      const auto code = std::uint32_t{reinterpret_cast<const std::uint8_t*>(at)[i]};
      return ptx::e4m3x2_to_float2(code).x;
    }
  }
};

/// The bf16 pair (in fp32) that fp8 rounds next.
__device__ __forceinline__ float2 rounded_to_bf16(float low, float high) {
  const std::uint32_t pair = ptx::cvt_bf16x2(low, high);
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U)};
}

__device__ __forceinline__ std::uint16_t encode_e4m3_pair(float low, float high) {
  const float2 pair = rounded_to_bf16(low, high);
  return ptx::cvt_e4m3x2(pair.x, pair.y);
}

__device__ __forceinline__ void store_latent(std::byte* row, LatentFormat format, std::int64_t i,
                                             float value) {
  switch (format) {
    case LatentFormat::kF32:
      reinterpret_cast<float*>(row)[i] = value;
      return;
    case LatentFormat::kBF16:
      reinterpret_cast<std::uint16_t*>(row)[i] =
          static_cast<std::uint16_t>(ptx::cvt_bf16x2(value, 0.0F));
      return;
    case LatentFormat::kFp8:
      reinterpret_cast<std::uint8_t*>(row)[i] =
          static_cast<std::uint8_t>(encode_e4m3_pair(value, 0.0F));
      return;
  }
}

/// Elements at .. at + 3 of a row of n; those beyond its end are dropped. kAligned: quads start at
/// multiples of their size and n is a multiple of 4.
template <bool kAligned>
__device__ __forceinline__ void store_latent_quad(std::byte* row, LatentFormat format,
                                                  std::int64_t at, std::int64_t n,
                                                  const Quad& quad) {
  if constexpr (!kAligned) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (at + i < n) {
        store_latent(row, format, at + i, quad.v[i]);
      }
    }
    return;
  }
  if (at >= n) {
    return;
  }
  switch (format) {
    case LatentFormat::kF32:
      store_quad<true>(reinterpret_cast<float*>(row), at, n, quad);
      return;
    case LatentFormat::kBF16:
      *reinterpret_cast<uint2*>(row + at * 2) = {ptx::cvt_bf16x2(quad.v[0], quad.v[1]),
                                                 ptx::cvt_bf16x2(quad.v[2], quad.v[3])};
      return;
    case LatentFormat::kFp8:
      *reinterpret_cast<std::uint32_t*>(row + at) =
          encode_e4m3_pair(quad.v[0], quad.v[1]) |
          std::uint32_t{encode_e4m3_pair(quad.v[2], quad.v[3])} << 16;
      return;
  }
}

/// Quads of every row start at multiples of their size.
[[nodiscard]] inline bool whole_quads(const LatentRows& rows) {
  return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.width % kQuad == 0 &&
         rows.row_bytes % (kQuad * element_bytes(rows.format)) == 0;
}

}  // namespace tandem::cuda
