// map_rows.cuh — one function applied to every element of some operands of one shape.
// Traffic   each operand once, 16 bytes a thread where all of them are aligned; memory bound.
// Launch    one thread a quad of columns; blocks are as wide as the rows, up to 256 columns of
//           quads, and taller the narrower they are; grid-stride over rows; graph-safe.
#pragma once

#include <algorithm>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/quad.cuh"

namespace tandem::cuda {

/// Operands [A, B, C]; a stride of 0 repeats an input along its axis.
template <int kIn, int kOut>
struct MapOperands {
  Cube<const float> in[kIn];
  Cube<float> out[kOut];
};

struct MapShape {
  std::int64_t a, b, c;
};

constexpr int kMapThreads = 256;
constexpr std::int64_t kMaxGridYZ = 65535;

/// fn(in, out, b) sets out[] of one element from in[]; b is the element's place on axis B. Every
/// input of a quad is read before its outputs are written: an output may be an input.
template <bool kAligned, int kIn, int kOut, typename Fn>
__global__ void __launch_bounds__(kMapThreads)
    map_elements(const __grid_constant__ MapOperands<kIn, kOut> operands, const MapShape shape,
                 const Fn fn) {
  begin_kernel();
  const std::int64_t at =
      (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kQuad;
  if (at >= shape.c) {
    return;
  }
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * blockDim.y;
  for (std::int64_t b = blockIdx.z; b < shape.b; b += gridDim.z) {
#pragma unroll 1
    for (std::int64_t a = first; a < shape.a; a += step) {
      Quad in[kIn];
      Quad out[kOut];
#pragma unroll
      for (int k = 0; k < kIn; ++k) {
        in[k] = load_quad<kAligned>(operands.in[k].row(a, b), at, shape.c);
      }
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        float x[kIn];
        float y[kOut];
#pragma unroll
        for (int k = 0; k < kIn; ++k) {
          x[k] = in[k].v[i];
        }
        fn(x, y, b);
#pragma unroll
        for (int k = 0; k < kOut; ++k) {
          out[k].v[i] = y[k];
        }
      }
#pragma unroll
      for (int k = 0; k < kOut; ++k) {
        store_quad<kAligned>(operands.out[k].row(a, b), at, shape.c, out[k]);
      }
    }
  }
}

/// aligned: whole_quads() of every operand.
template <int kIn, int kOut, typename Fn>
void launch_map(const ExecCtx& ctx, const char* op, bool aligned,
                const MapOperands<kIn, kOut>& operands, const MapShape& shape, const Fn& fn) {
  if (shape.a == 0 || shape.b == 0 || shape.c == 0) {
    return;
  }
  const std::int64_t quads = (shape.c + kQuad - 1) / kQuad;
  unsigned width = 1;
  while (width < kMapThreads && width < quads) {
    width *= 2;
  }
  const dim3 block(width, kMapThreads / width);
  const dim3 grid(static_cast<unsigned>((quads + width - 1) / width),
                  static_cast<unsigned>(std::min((shape.a + block.y - 1) / block.y, kMaxGridYZ)),
                  static_cast<unsigned>(std::min(shape.b, kMaxGridYZ)));
  const auto kernel =
      aligned ? map_elements<true, kIn, kOut, Fn> : map_elements<false, kIn, kOut, Fn>;
  launch(ctx, op, kernel, {grid, block}, operands, shape, fn);
}

struct Same {
  __device__ void operator()(const float (&x)[1], float (&y)[1], std::int64_t) const {
    y[0] = x[0];
  }
};

/// A matrix as the only slice of axis B.
template <typename T>
[[nodiscard]] Cube<T> one_slice(const TensorView<T, 2>& view) {
  return {view.data(), view.stride(0), 0};
}

}  // namespace tandem::cuda
