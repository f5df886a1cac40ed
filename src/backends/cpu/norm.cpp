// norm.cpp — RMSNorm, gated RMSNorm and L2 norm. Contract: ops/norm.h. Oracle: ops/ref/norm_ref.h.
//
// Traffic: one pass to reduce, one to write; a row stays in L1/L2 between them.
// Numerics: row sums on 4 interleaved fp32 vector accumulators; parameter gradients are summed per
// fixed block of rows, then over blocks in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/norm.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <cmath>
#include <span>

#include "backends/cpu/families.h"
#include "backends/cpu/row_blocks.h"
#include "backends/cpu/simd_loops-inl.h"
#include "backends/cpu/simd_math-inl.h"
#include "core/checked_cast.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr double kNsPerElement = 0.4;
constexpr double kGatedNsPerElement = 1.5;
constexpr std::int64_t kMinGradRows = 16;  // rows per block where a block owns a partial d_w

HWY_INLINE float rms_scale(const float* x, std::size_t n, float eps) {
  return 1.0F / std::sqrt(row_dot(x, x, n) / static_cast<float>(n) + eps);
}

HWY_INLINE void rms_norm_row(float* y, const float* x, const float* w, std::size_t n, float eps) {
  const auto scale = hn::Set(FloatTag(), rms_scale(x, n, eps));
  for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
    part.store(hn::Mul(hn::Mul(part.load(x + i), scale), part.load(w + i)), y + i);
  });
}

HWY_INLINE void rms_norm_bwd_row(float* d_x, float* d_w, const float* d_y, const float* x,
                                 const float* w, std::size_t n, float eps) {
  const FloatTag d;
  const float scale_value = rms_scale(x, n, eps);
  const auto scale = hn::Set(d, scale_value);
  const float dot = row_sum(n, [&](FloatVec acc, std::size_t i, auto part) HWY_ATTR {
    const auto d_n = hn::Mul(part.load(d_y + i), part.load(w + i));
    return hn::MulAdd(d_n, hn::Mul(part.load(x + i), scale), acc);
  });
  const auto mean = hn::Set(d, dot / static_cast<float>(n));
  for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
    const auto dy = part.load(d_y + i);
    const auto norm = hn::Mul(part.load(x + i), scale);
    const auto d_n = hn::Mul(dy, part.load(w + i));
    part.store(hn::MulAdd(dy, norm, part.load(d_w + i)), d_w + i);
    part.store(hn::Mul(scale, hn::NegMulAdd(norm, mean, d_n)), d_x + i);
  });
}

HWY_INLINE void rms_norm_gated_row(float* y, const float* o, const float* gate, const float* w,
                                   std::size_t n, float eps) {
  const FloatTag d;
  const auto scale = hn::Set(d, rms_scale(o, n, eps));
  for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
    const auto norm = hn::Mul(hn::Mul(part.load(o + i), scale), part.load(w + i));
    part.store(hn::Mul(norm, vsigmoid(d, part.load(gate + i))), y + i);
  });
}

/// Per block: the partial d_w, and room for one row of sigmoid(gate).
struct GatedBwdScratch {
  float* d_w;
  float* sigmoid;
};

HWY_INLINE void rms_norm_gated_bwd_row(float* d_o, float* d_gate, const GatedBwdScratch& scratch,
                                       const float* d_y, const float* o, const float* gate,
                                       const float* w, std::size_t n, float eps) {
  const FloatTag d;
  float* const d_w = scratch.d_w;
  float* const s_row = scratch.sigmoid;
  const auto scale = hn::Set(d, rms_scale(o, n, eps));
  const float dot = row_sum(n, [&](FloatVec acc, std::size_t i, auto part) HWY_ATTR {
    const auto sig = vsigmoid_pair(d, part.load(gate + i));
    const auto norm = hn::Mul(part.load(o + i), scale);
    const auto dy = part.load(d_y + i);
    const auto d_n = hn::Mul(hn::Mul(dy, part.load(w + i)), sig.value);
    const auto dy_norm = hn::Mul(dy, norm);
    part.store(sig.value, s_row + i);
    part.store(hn::MulAdd(dy_norm, sig.value, part.load(d_w + i)), d_w + i);
    part.store(hn::Mul(hn::Mul(hn::Mul(dy_norm, part.load(w + i)), sig.value), sig.complement),
               d_gate + i);
    return hn::MulAdd(d_n, norm, acc);
  });
  const auto mean = hn::Set(d, dot / static_cast<float>(n));
  for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
    const auto norm = hn::Mul(part.load(o + i), scale);
    const auto d_n = hn::Mul(hn::Mul(part.load(d_y + i), part.load(w + i)), part.load(s_row + i));
    part.store(hn::Mul(scale, hn::NegMulAdd(norm, mean, d_n)), d_o + i);
  });
}

HWY_INLINE void l2_norm_row(float* y, const float* x, std::size_t n, float factor, float eps) {
  const auto scale = hn::Set(FloatTag(), factor / std::sqrt(row_dot(x, x, n) + eps));
  for_each_vector(n, [&](std::size_t i, auto part)
                         HWY_ATTR { part.store(hn::Mul(part.load(x + i), scale), y + i); });
}

HWY_INLINE void l2_norm_bwd_row(float* d_x, const float* d_y, const float* x, std::size_t n,
                                float factor, float eps) {
  const FloatTag d;
  const float rho = 1.0F / std::sqrt(row_dot(x, x, n) + eps);
  const auto slope = hn::Set(d, rho * (rho * row_dot(x, d_y, n)));
  const auto scale = hn::Set(d, factor * rho);
  for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
    const auto inner = hn::NegMulAdd(part.load(x + i), slope, part.load(d_y + i));
    part.store(hn::Mul(scale, inner), d_x + i);
  });
}

/// Row r of the T*H rows of a cube.
template <typename T>
HWY_INLINE T* cube_row(TensorView<T, 3> cube, std::int64_t r) {
  return cube.data() + r / cube.size(1) * cube.stride(0) + r % cube.size(1) * cube.stride(1);
}

void rms_norm(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, ConstF32Vec w, float eps) {
  const std::size_t n = usize(x.size(1));
  const RowBlocks blocks = row_blocks(x.size(0), kNsPerElement * static_cast<double>(n));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    for (std::int64_t t = begin; t < end; ++t) {
      rms_norm_row(y.row(t), x.row(t), w.data(), n, eps);
    }
  });
}

void rms_norm_bwd(const ExecCtx& ctx, F32Mat d_x, F32Vec d_w, ConstF32Mat d_y, ConstF32Mat x,
                  ConstF32Vec w, float eps) {
  const std::size_t n = usize(x.size(1));
  const RowBlocks blocks =
      row_blocks(x.size(0), 2 * kNsPerElement * static_cast<double>(n), kMinGradRows);
  const ArenaScope scope(*ctx.workspace);
  const auto partials = take_zeroed(ctx, blocks.count(), x.size(1));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t b) HWY_ATTR {
    for (std::int64_t t = begin; t < end; ++t) {
      rms_norm_bwd_row(d_x.row(t), &partials[usize(b) * n], d_y.row(t), x.row(t), w.data(), n, eps);
    }
  });
  add_partials(ctx, d_w.data(), partials, n);
}

void rms_norm_gated(const ExecCtx& ctx, F32Cube y, ConstF32Cube o, ConstF32Cube gate, ConstF32Vec w,
                    float eps) {
  const std::size_t n = usize(o.size(2));
  const RowBlocks blocks =
      row_blocks(o.size(0) * o.size(1), kGatedNsPerElement * static_cast<double>(n));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    for (std::int64_t r = begin; r < end; ++r) {
      rms_norm_gated_row(cube_row(y, r), cube_row(o, r), cube_row(gate, r), w.data(), n, eps);
    }
  });
}

void rms_norm_gated_bwd(const ExecCtx& ctx, F32Cube d_o, F32Cube d_gate, F32Vec d_w,
                        ConstF32Cube d_y, ConstF32Cube o, ConstF32Cube gate, ConstF32Vec w,
                        float eps) {
  const std::size_t n = usize(o.size(2));
  const RowBlocks blocks = row_blocks(
      o.size(0) * o.size(1), 2 * kGatedNsPerElement * static_cast<double>(n), kMinGradRows);
  const ArenaScope scope(*ctx.workspace);
  const auto partials = take_zeroed(ctx, blocks.count(), o.size(2));
  const auto sigmoids = ctx.workspace->take<float>(blocks.count() * o.size(2));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t b) HWY_ATTR {
    const GatedBwdScratch scratch{&partials[usize(b) * n], &sigmoids[usize(b) * n]};
    for (std::int64_t r = begin; r < end; ++r) {
      rms_norm_gated_bwd_row(cube_row(d_o, r), cube_row(d_gate, r), scratch, cube_row(d_y, r),
                             cube_row(o, r), cube_row(gate, r), w.data(), n, eps);
    }
  });
  add_partials(ctx, d_w.data(), partials, n);
}

void l2_norm(const ExecCtx& ctx, F32Cube y, ConstF32Cube x, std::span<const float> scales,
             float eps) {
  const std::size_t n = usize(x.size(2));
  const std::int64_t heads = x.size(1) / isize(scales);  // of one scale
  const RowBlocks blocks =
      row_blocks(x.size(0) * x.size(1), kNsPerElement * static_cast<double>(n));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    for (std::int64_t r = begin; r < end; ++r) {
      const float scale = scales[usize(r % x.size(1) / heads)];
      l2_norm_row(cube_row(y, r), cube_row(x, r), n, scale, eps);
    }
  });
}

void l2_norm_bwd(const ExecCtx& ctx, F32Cube d_x, ConstF32Cube d_y, ConstF32Cube x, float scale,
                 float eps) {
  const std::size_t n = usize(x.size(2));
  const RowBlocks blocks =
      row_blocks(x.size(0) * x.size(1), 2 * kNsPerElement * static_cast<double>(n));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    for (std::int64_t r = begin; r < end; ++r) {
      l2_norm_bwd_row(cube_row(d_x, r), cube_row(d_y, r), cube_row(x, r), n, scale, eps);
    }
  });
}

NormOps norm_ops() {
  return {
      .rms_norm = rms_norm,
      .rms_norm_bwd = rms_norm_bwd,
      .rms_norm_gated = rms_norm_gated,
      .rms_norm_gated_bwd = rms_norm_gated_bwd,
      .l2_norm = l2_norm,
      .l2_norm_bwd = l2_norm_bwd,
  };
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(norm_ops);
NormOps cpu_norm_ops() {
  return HWY_DYNAMIC_DISPATCH(norm_ops)();
}

}  // namespace tandem
#endif  // HWY_ONCE
