// attn_res.cpp — Attention Residuals. Contract: ops/attn_res.h. Oracle: ops/ref/attn_res_ref.h.
//
// Traffic: each source row is read once for its two sums (x.x and x.c) and once for the mix; the n
// rows of a token (n D floats) stay in L1/L2 between them.
// Numerics: fp32; c = w u is formed once a call; the mix is one multiply-add chain over the sources
// in order. d_w and d_u: partial sums of c's gradient per fixed block of rows, then blocks in
// order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/attn_res.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <cmath>
#include <span>

#include "backends/cpu/families.h"
#include "backends/cpu/row_blocks.h"
#include "backends/cpu/simd_loops-inl.h"
#include "core/checked_cast.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr double kNsPerElement = 0.3;
constexpr std::int64_t kMinGradRows = 16;
constexpr std::size_t kMaxSources = 32;

using Sources = std::span<const ConstF32Mat>;

/// x.x and x.c of one row in one pass, two accumulators each.
struct RowSums {
  float squares;
  float dot;
};
HWY_INLINE RowSums row_sums(const float* x, const float* c, std::size_t n) {
  const FloatTag d;
  const std::size_t lanes = hn::Lanes(d);
  FloatVec squares0 = hn::Zero(d);
  FloatVec squares1 = hn::Zero(d);
  FloatVec dots0 = hn::Zero(d);
  FloatVec dots1 = hn::Zero(d);
  const auto step = [&](FloatVec& squares, FloatVec& dots, std::size_t at, auto part) HWY_ATTR {
    const auto v = part.load(x + at);
    squares = hn::MulAdd(v, v, squares);
    dots = hn::MulAdd(v, part.load(c + at), dots);
  };
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    step(squares0, dots0, i, Full{});
    step(squares1, dots1, i + lanes, Full{});
  }
  if (i + lanes <= n) {
    step(squares0, dots0, i, Full{});
    i += lanes;
  }
  if (i < n) {
    step(squares1, dots1, i, Tail{n - i});
  }
  return {hn::GetLane(hn::SumOfLanes(d, hn::Add(squares0, squares1))),
          hn::GetLane(hn::SumOfLanes(d, hn::Add(dots0, dots1)))};
}

/// Scale r, score s and weight p of each source of one row.
struct RowWeights {
  float r[kMaxSources];
  float s[kMaxSources];
  float p[kMaxSources];
};
HWY_INLINE RowWeights row_weights(Sources sources, const float* c, std::size_t n, float eps,
                                  std::int64_t t) {
  RowWeights row;
  float top = -HUGE_VALF;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const RowSums sums = row_sums(sources[i].row(t), c, n);
    row.r[i] = 1.0F / std::sqrt(sums.squares / static_cast<float>(n) + eps);
    row.s[i] = row.r[i] * sums.dot;
    top = std::max(top, row.s[i]);
  }
  float total = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    row.p[i] = std::exp(row.s[i] - top);
    total += row.p[i];
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    row.p[i] /= total;
  }
  return row;
}

/// c = w u, in the workspace.
std::span<float> combined_query(const ExecCtx& ctx, ConstF32Vec w, ConstF32Vec u) {
  const auto c = ctx.workspace->take<float>(w.size(0));
  for_each_vector(c.size(), [&](std::size_t i, auto part) HWY_ATTR {
    part.store(hn::Mul(part.load(w.data() + i), part.load(u.data() + i)), c.data() + i);
  });
  return c;
}

void mix_rows(const ExecCtx& ctx, F32Mat out, Sources sources, ConstF32Vec w, ConstF32Vec u,
              float eps) {
  const std::size_t n = usize(out.size(1));
  const ArenaScope scope(*ctx.workspace);
  const float* const c = combined_query(ctx, w, u).data();
  const RowBlocks blocks =
      row_blocks(out.size(0), kNsPerElement * static_cast<double>(n * sources.size()));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    for (std::int64_t t = begin; t < end; ++t) {
      if (sources.size() == 1) {  // p = 1, whatever the score
        std::copy_n(sources[0].row(t), n, out.row(t));
        continue;
      }
      const RowWeights row = row_weights(sources, c, n, eps, t);
      for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
        FloatVec sum = hn::Zero(FloatTag());
        for (std::size_t k = 0; k < sources.size(); ++k) {
          const auto p = hn::Set(FloatTag(), row.p[k]);
          sum = hn::MulAdd(p, part.load(sources[k].row(t) + i), sum);
        }
        part.store(sum, out.row(t) + i);
      });
    }
  });
}

void aggregate(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, Sources sources, ConstF32Vec w,
               ConstF32Vec u, float eps) {
  const F32Mat mixed = out.size(1) > 0 ? out : norm.y;  // the norm works in place as well
  mix_rows(ctx, mixed, sources, w, u, eps);
  if (norm.wanted()) {
    cpu_norm_ops().rms_norm(ctx, norm.y, mixed, norm.w, norm.eps);
  }
}

/// d_source += p d_out + a c - b x, d_c += a x.
HWY_INLINE void source_bwd_row(float* d_source, float* d_c, const float* d_out, const float* x,
                               const float* c, std::size_t n, float p, float a, float b) {
  const FloatTag d;
  const auto vp = hn::Set(d, p);
  const auto va = hn::Set(d, a);
  const auto vb = hn::Set(d, b);
  for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
    const auto v = part.load(x + i);
    auto sum = hn::MulAdd(vp, part.load(d_out + i), hn::Mul(va, part.load(c + i)));
    sum = hn::NegMulAdd(vb, v, sum);
    part.store(hn::Add(part.load(d_source + i), sum), d_source + i);
    part.store(hn::MulAdd(va, v, part.load(d_c + i)), d_c + i);
  });
}

void aggregate_bwd(const ExecCtx& ctx, std::span<const F32Mat> d_sources, F32Vec d_w, F32Vec d_u,
                   ConstF32Mat d_out, Sources sources, ConstF32Vec w, ConstF32Vec u, float eps) {
  const std::size_t n = usize(d_out.size(1));
  const ArenaScope scope(*ctx.workspace);
  const float* const c = combined_query(ctx, w, u).data();
  const RowBlocks blocks = row_blocks(
      d_out.size(0), 3 * kNsPerElement * static_cast<double>(n * sources.size()), kMinGradRows);
  const auto partials = take_zeroed(ctx, blocks.count(), d_out.size(1));
  const auto d_c = take_zeroed(ctx, 1, d_out.size(1));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t b) HWY_ATTR {
    for (std::int64_t t = begin; t < end; ++t) {
      const RowWeights row = row_weights(sources, c, n, eps, t);
      float d_p[kMaxSources];
      float mean = 0;
      for (std::size_t i = 0; i < sources.size(); ++i) {
        d_p[i] = row_dot(sources[i].row(t), d_out.row(t), n);
        mean += row.p[i] * d_p[i];
      }
      for (std::size_t i = 0; i < sources.size(); ++i) {
        const float a = row.p[i] * (d_p[i] - mean) * row.r[i];
        const float back = a * (row.s[i] * row.r[i] / static_cast<float>(n));
        source_bwd_row(d_sources[i].row(t), &partials[usize(b) * n], d_out.row(t),
                       sources[i].row(t), c, n, row.p[i], a, back);
      }
    }
  });
  add_partials(ctx, d_c.data(), partials, n);
  for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
    const auto grad = part.load(d_c.data() + i);
    const auto grad_w = hn::MulAdd(grad, part.load(u.data() + i), part.load(d_w.data() + i));
    const auto grad_u = hn::MulAdd(grad, part.load(w.data() + i), part.load(d_u.data() + i));
    part.store(grad_w, d_w.data() + i);
    part.store(grad_u, d_u.data() + i);
  });
}

AttnResOps attn_res_ops() {
  return {.aggregate = aggregate, .aggregate_bwd = aggregate_bwd};
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(attn_res_ops);
AttnResOps cpu_attn_res_ops() {
  return HWY_DYNAMIC_DISPATCH(attn_res_ops)();
}

}  // namespace tandem
#endif  // HWY_ONCE
