// norm.cu — RMSNorm, gated RMSNorm and L2 norm, forward.   Contract: ops/norm.h
// Oracle: ops/ref/norm_ref.h
// Traffic   each operand once: a row stays in registers between its sum and its result (up to 8,192
//           elements for a block, 128 for a warp; what is beyond is read twice). Operands that do
//           not depend on the sum are loaded before it.
// Numerics  fp32; a thread sums its quads in order, then lanes, then warps.
// Launch    RMSNorm: a block a row; per-head norms: a warp a row. Graph-safe.
#include <algorithm>
#include <cmath>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/families.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/norm.cuh"
#include "backends/cuda/norm_bwd.h"
#include "backends/cuda/row_group.cuh"
#include "backends/cuda/sigmoid.cuh"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kMaxGridY = 65535;

struct NormShape {
  std::int64_t rows, heads, width;
};

/// y = x scale w.
struct RmsNorm {
  struct Factors {
    Quad w;
  };
  Cube<float> y;
  Cube<const float> x;
  const float* w;
  float eps;
  __device__ float scale(float squares, std::int64_t width, std::int64_t) const {
    return rms_scale(squares, width, eps);
  }
  template <bool kAligned>
  __device__ Factors factors(std::int64_t, std::int64_t, std::int64_t at, std::int64_t n) const {
    return {load_quad<kAligned>(w, at, n)};
  }
  __device__ static float value(float x, float scale, const Factors& by, int i) {
    return x * scale * by.w.v[i];
  }
};

/// y = x scale w sigmoid(gate).
struct RmsNormGated {
  struct Factors {
    Quad w, gate;
  };
  Cube<float> y;
  Cube<const float> x, gate;
  const float* w;
  float eps;
  __device__ float scale(float squares, std::int64_t width, std::int64_t) const {
    return rms_scale(squares, width, eps);
  }
  template <bool kAligned>
  __device__ Factors factors(std::int64_t t, std::int64_t h, std::int64_t at,
                             std::int64_t n) const {
    return {load_quad<kAligned>(w, at, n), load_quad<kAligned>(gate.row(t, h), at, n)};
  }
  __device__ static float value(float x, float scale, const Factors& by, int i) {
    return gated_value(x, scale, by.w.v[i], sigmoid(by.gate.v[i]));
  }
};

/// y = x scale.
struct L2Norm {
  struct Factors {};
  Cube<float> y;
  Cube<const float> x;
  float scales[kMaxL2Scales];
  std::int64_t heads;  // of one scale
  float eps;
  __device__ float scale(float squares, std::int64_t, std::int64_t h) const {
    float factor = scales[0];
#pragma unroll
    for (int i = 1; i < kMaxL2Scales; ++i) {
      factor = h >= i * heads ? scales[i] : factor;
    }
    return l2_scale(squares, factor, eps);
  }
  template <bool kAligned>
  __device__ Factors factors(std::int64_t, std::int64_t, std::int64_t, std::int64_t) const {
    return {};
  }
  __device__ static float value(float x, float scale, const Factors&, int) {
    return x * scale;
  }
};

template <typename Norm>
__device__ __forceinline__ Quad normed(const Quad& x, float scale,
                                       const typename Norm::Factors& by) {
  Quad y;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    y.v[i] = Norm::value(x.v[i], scale, by, i);
  }
  return y;
}

/// One group of threads a row; kHeld quads a thread stay in registers. y may be x: a thread writes
/// only what it alone reads.
template <typename Group, int kHeld, bool kAligned, typename Norm>
__global__ void __launch_bounds__(kRowThreads) norm_rows(const Norm norm, const NormShape shape) {
  begin_kernel();
  const std::int64_t h = static_cast<std::int64_t>(blockIdx.x) * Group::kPerBlock + Group::index();
  if (h >= shape.heads) {
    return;
  }
  const std::int64_t n = shape.width;
  for (std::int64_t t = blockIdx.y; t < shape.rows; t += gridDim.y) {
    const float* const x = norm.x.row(t, h);
    float* const y = norm.y.row(t, h);
    Quad held[kHeld];
    typename Norm::Factors by[kHeld];
#pragma unroll
    for (int q = 0; q < kHeld; ++q) {
      held[q] = load_quad<kAligned>(x, quad_start<Group>(q), n);
      by[q] = norm.template factors<kAligned>(t, h, quad_start<Group>(q), n);
    }
    float squares = 0.0F;
#pragma unroll
    for (int q = 0; q < kHeld; ++q) {
      squares = add_squares(squares, held[q]);
    }
    const std::int64_t rest = quad_start<Group>(kHeld);
    for (std::int64_t at = rest; at < n; at += Group::kSize * kQuad) {
      squares = add_squares(squares, load_quad<kAligned>(x, at, n));
    }
    const float scale = norm.scale(Group::sum(squares), n, h);
#pragma unroll
    for (int q = 0; q < kHeld; ++q) {
      store_quad<kAligned>(y, quad_start<Group>(q), n, normed<Norm>(held[q], scale, by[q]));
    }
    for (std::int64_t at = rest; at < n; at += Group::kSize * kQuad) {
      const auto factors = norm.template factors<kAligned>(t, h, at, n);
      store_quad<kAligned>(y, at, n, normed<Norm>(load_quad<kAligned>(x, at, n), scale, factors));
    }
  }
}

template <typename Group, int kHeld, typename Norm>
void launch_norm(const ExecCtx& ctx, const char* op, bool aligned, const Norm& norm,
                 const NormShape& shape) {
  if (shape.rows == 0 || shape.heads == 0 || shape.width == 0) {
    return;
  }
  const dim3 grid(static_cast<unsigned>((shape.heads + Group::kPerBlock - 1) / Group::kPerBlock),
                  static_cast<unsigned>(std::min(shape.rows, kMaxGridY)));
  const auto kernel =
      aligned ? norm_rows<Group, kHeld, true, Norm> : norm_rows<Group, kHeld, false, Norm>;
  launch(ctx, op, kernel, {grid, kRowThreads}, norm, shape);
}

void rms_norm(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, ConstF32Vec w, float eps) {
  const bool aligned = whole_quads(y) && whole_quads(x) && whole_quads(w);
  const RmsNorm norm{{y.data(), y.stride(0), 0}, {x.data(), x.stride(0), 0}, w.data(), eps};
  const NormShape shape{x.size(0), 1, x.size(1)};
  constexpr std::int64_t kShort = 2 * kRowThreads * kQuad;
  if (shape.width <= kShort) {
    launch_norm<BlockGroup, 2>(ctx, "rms_norm", aligned, norm, shape);
  } else {
    launch_norm<BlockGroup, 8>(ctx, "rms_norm", aligned, norm, shape);
  }
}

void rms_norm_gated(const ExecCtx& ctx, F32Cube y, ConstF32Cube o, ConstF32Cube gate, ConstF32Vec w,
                    float eps) {
  const bool aligned = whole_quads(y) && whole_quads(o) && whole_quads(gate) && whole_quads(w);
  const RmsNormGated norm{device_cube(y), device_cube(o), device_cube(gate), w.data(), eps};
  launch_norm<WarpGroup, 1>(ctx, "rms_norm_gated", aligned, norm,
                            {o.size(0), o.size(1), o.size(2)});
}

void l2_norm(const ExecCtx& ctx, F32Cube y, ConstF32Cube x, std::span<const float> scales,
             float eps) {
  L2Norm norm{device_cube(y), device_cube(x), {}, x.size(1) / isize(scales), eps};
  for (std::size_t i = 0; i < scales.size(); ++i) {
    norm.scales[i] = scales[i];
  }
  launch_norm<WarpGroup, 1>(ctx, "l2_norm", whole_quads(y) && whole_quads(x), norm,
                            {x.size(0), x.size(1), x.size(2)});
}

}  // namespace

NormOps norm_ops() {
  return {.rms_norm = rms_norm,
          .rms_norm_bwd = rms_norm_bwd,
          .rms_norm_gated = rms_norm_gated,
          .rms_norm_gated_bwd = rms_norm_gated_bwd,
          .l2_norm = l2_norm,
          .l2_norm_bwd = l2_norm_bwd};
}

}  // namespace tandem::cuda
