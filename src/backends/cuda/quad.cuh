// quad.cuh — four adjacent floats of a row, moved by one 16-byte access where alignment allows it.
// Which thread owns which element does not depend on the alignment, so neither do the sums.
#pragma once

#include <cstdint>

#include "tensor/view.h"

namespace tandem::cuda {

constexpr int kQuad = 4;

struct Quad {
  float v[kQuad];
};

/// Elements at .. at + 3 of a row of n; those beyond its end read as `beyond`. kAligned: the row
/// starts on 16 bytes and n is a multiple of 4.
template <bool kAligned>
__device__ __forceinline__ Quad load_quad(const float* row, std::int64_t at, std::int64_t n,
                                          float beyond = 0.0F) {
  Quad quad{beyond, beyond, beyond, beyond};
  if constexpr (kAligned) {
    if (at < n) {
      const float4 four = *reinterpret_cast<const float4*>(row + at);
      quad = {four.x, four.y, four.z, four.w};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (at + i < n) {
        quad.v[i] = row[at + i];
      }
    }
  }
  return quad;
}

/// Elements beyond the row's end are dropped.
template <bool kAligned>
__device__ __forceinline__ void store_quad(float* row, std::int64_t at, std::int64_t n,
                                           const Quad& quad) {
  if constexpr (kAligned) {
    if (at < n) {
      *reinterpret_cast<float4*>(row + at) =
          make_float4(quad.v[0], quad.v[1], quad.v[2], quad.v[3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (at + i < n) {
        row[at + i] = quad.v[i];
      }
    }
  }
}

/// sum + the quad's squares, in order.
__device__ __forceinline__ float add_squares(float sum, const Quad& x) {
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    sum = fmaf(x.v[i], x.v[i], sum);
  }
  return sum;
}

/// Every row of the view starts on 16 bytes and holds whole quads.
template <typename T, int Rank>
[[nodiscard]] bool whole_quads(const TensorView<T, Rank>& view) {
  bool whole = reinterpret_cast<std::uintptr_t>(view.data()) % sizeof(float4) == 0 &&
               view.size(Rank - 1) % kQuad == 0;
  for (int axis = 0; axis < Rank - 1; ++axis) {
    whole = whole && (view.size(axis) <= 1 || view.stride(axis) % kQuad == 0);
  }
  return whole;
}

}  // namespace tandem::cuda
