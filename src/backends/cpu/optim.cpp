// optim.cpp — AdamW, Muon and the gradient norm. Contract: ops/optim.h. Oracle:
// ops/ref/optim_ref.h.
//
// Everything is cut into fixed blocks of elements, rows or columns; sums of squares are formed in
// double per block of 4096 and added in block order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/optim.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "backends/cpu/families.h"
#include "backends/cpu/row_blocks.h"
#include "backends/cpu/simd_loops-inl.h"
#include "core/checked_cast.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kAdamBlock = 16384;
constexpr std::int64_t kSquaresBlock = 4096;

void adamw(const ExecCtx& ctx, std::span<float> w, std::span<float> m, std::span<float> v,
           std::span<const float> g, const AdamWParams& p) {
  const double step = static_cast<double>(p.step);
  const auto correction = [step](float beta) {
    return static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(beta), step)));
  };
  const float m_factor = correction(p.beta1);
  const float v_factor = correction(p.beta2);
  const RowBlocks blocks{isize(w), kAdamBlock};
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    const FloatTag d;
    const auto scale = hn::Set(d, p.grad_scale);
    const auto keep_m = hn::Set(d, p.beta1);
    const auto keep_v = hn::Set(d, p.beta2);
    const auto new_m = hn::Set(d, 1.0F - p.beta1);
    const auto new_v = hn::Set(d, 1.0F - p.beta2);
    const std::size_t first = usize(begin);
    for_each_vector(usize(end - begin), [&](std::size_t i, auto part) HWY_ATTR {
      const std::size_t at = first + i;
      const auto grad = hn::Mul(part.load(&g[at]), scale);
      const auto m1 = hn::MulAdd(keep_m, part.load(&m[at]), hn::Mul(new_m, grad));
      const auto v1 = hn::MulAdd(keep_v, part.load(&v[at]), hn::Mul(hn::Mul(new_v, grad), grad));
      const auto root = hn::Sqrt(hn::Mul(v1, hn::Set(d, v_factor)));
      const auto ratio =
          hn::Div(hn::Mul(m1, hn::Set(d, m_factor)), hn::Add(root, hn::Set(d, p.eps)));
      const auto weight = part.load(&w[at]);
      const auto update = hn::MulAdd(hn::Set(d, p.weight_decay), weight, ratio);
      part.store(m1, &m[at]);
      part.store(v1, &v[at]);
      part.store(hn::NegMulAdd(hn::Set(d, p.lr), update, weight), &w[at]);
    });
  });
}

HWY_INLINE double block_squares(const float* x, std::size_t n) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const std::size_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const auto a = hn::PromoteTo(d, hn::LoadU(df, x + i));
    const auto b = hn::PromoteTo(d, hn::LoadU(df, x + i + lanes));
    sum0 = hn::MulAdd(a, a, sum0);
    sum1 = hn::MulAdd(b, b, sum1);
  }
  double sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < n; ++i) {
    sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  return sum;
}

double sum_squares(const ExecCtx& ctx, std::span<const float> values) {
  const RowBlocks blocks{isize(values), kSquaresBlock};
  const ArenaScope scope(*ctx.workspace);
  const auto partials = ctx.workspace->take<double>(blocks.count());
  const auto body = [&](std::int64_t begin, std::int64_t end, std::int64_t b) HWY_ATTR {
    partials[usize(b)] = block_squares(values.data() + begin, usize(end - begin));
  };
  if (isize(values) <= 4 * kSquaresBlock) {  // too short to wake a worker for
    for (std::int64_t b = 0; b < blocks.count(); ++b) {
      body(blocks.begin(b), blocks.end(b), b);
    }
  } else {
    parallel_rows(ctx, blocks, body);
  }
  double sum = 0;
  for (const double partial : partials) {
    sum += partial;
  }
  return sum;
}

// Matrix products of Muon: C [m, n] = factor A [m, k] B [k, n] + add D [m, n], row-major and
// contiguous; D null: no second term. Split over panels of two vectors of columns; a panel of B is
// packed once, then every group of four rows of A is multiplied with it. Each element is one fma
// chain over k.
struct Product {
  float* c;
  const float* a;
  const float* b;
  const float* d;
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;
  float factor;
  float add;
};

template <std::size_t kRows>
HWY_INLINE void multiply_rows(const Product& p, const float* panel, std::int64_t row,
                              std::int64_t col, std::size_t width) {
  const FloatTag d;
  const std::size_t lanes = hn::Lanes(d);
  FloatVec left[kRows];
  FloatVec right[kRows];
  for (std::size_t r = 0; r < kRows; ++r) {
    left[r] = hn::Zero(d);
    right[r] = hn::Zero(d);
  }
  for (std::int64_t k = 0; k < p.k; ++k) {
    const auto b0 = hn::Load(d, panel + usize(k) * 2 * lanes);
    const auto b1 = hn::Load(d, panel + usize(k) * 2 * lanes + lanes);
    for (std::size_t r = 0; r < kRows; ++r) {
      const auto a = hn::Set(d, p.a[(row + static_cast<std::int64_t>(r)) * p.k + k]);
      left[r] = hn::MulAdd(a, b0, left[r]);
      right[r] = hn::MulAdd(a, b1, right[r]);
    }
  }
  const auto factor = hn::Set(d, p.factor);
  const auto add = hn::Set(d, p.add);
  for (std::size_t r = 0; r < kRows; ++r) {
    const std::int64_t at = (row + static_cast<std::int64_t>(r)) * p.n + col;
    const auto finish = [&](FloatVec sum, std::int64_t offset, auto part) HWY_ATTR {
      const auto old = p.d == nullptr ? hn::Zero(d) : hn::Mul(add, part.load(p.d + at + offset));
      part.store(hn::MulAdd(factor, sum, old), p.c + at + offset);
    };
    const std::int64_t half = static_cast<std::int64_t>(lanes);
    if (width == 2 * lanes) {
      finish(left[r], 0, Full{});
      finish(right[r], half, Full{});
    } else if (width >= lanes) {
      finish(left[r], 0, Full{});
      finish(right[r], half, Tail{width - lanes});
    } else {
      finish(left[r], 0, Tail{width});
    }
  }
}

void multiply(const ExecCtx& ctx, const Product& p) {
  const FloatTag d;
  const std::int64_t panel_cols = 2 * static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t panel_size = p.k * panel_cols;
  const ArenaScope scope(*ctx.workspace);
  const auto panels = ctx.workspace->take<float>(panel_size * ctx.pool->num_threads());
  const RowBlocks cols{p.n, panel_cols};
  ctx.pool->parallel_for(cols.count(), [&](std::int64_t block, int thread) HWY_ATTR {
    float* const panel = &panels[usize(thread * panel_size)];
    const std::int64_t col = cols.begin(block);
    const std::size_t width = usize(cols.end(block) - col);
    for (std::int64_t k = 0; k < p.k; ++k) {
      float* const row = panel + k * panel_cols;
      std::copy_n(p.b + k * p.n + col, width, row);
      std::fill(row + width, row + panel_cols, 0.0F);
    }
    std::int64_t row = 0;
    for (; row + 4 <= p.m; row += 4) {
      multiply_rows<4>(p, panel, row, col, width);
    }
    for (; row < p.m; ++row) {
      multiply_rows<1>(p, panel, row, col, width);
    }
  });
}

void transpose(float* out, const float* in, std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kTile = 16;
  for (std::int64_t i0 = 0; i0 < rows; i0 += kTile) {
    for (std::int64_t j0 = 0; j0 < cols; j0 += kTile) {
      for (std::int64_t i = i0; i < std::min(rows, i0 + kTile); ++i) {
        for (std::int64_t j = j0; j < std::min(cols, j0 + kTile); ++j) {
          out[j * rows + i] = in[i * cols + j];
        }
      }
    }
  }
}

/// Five Newton-Schulz steps on x / |x|_F, x [rows, cols] with rows <= cols; a zero x stays zero.
void orthogonalise(const ExecCtx& ctx, std::span<float> x, std::int64_t rows, std::int64_t cols) {
  constexpr float kA = 3.4445F;
  constexpr float kB = -4.7750F;
  constexpr float kC = 2.0315F;
  const double norm = std::sqrt(sum_squares(ctx, x));
  const float inverse = norm > 0 ? static_cast<float>(1.0 / norm) : 0.0F;
  for (float& value : x) {
    value *= inverse;
  }
  auto next = ctx.workspace->take<float>(rows * cols);
  const auto turned = ctx.workspace->take<float>(rows * cols);
  const auto gram = ctx.workspace->take<float>(rows * rows);
  const auto poly = ctx.workspace->take<float>(rows * rows);
  std::span<float> now = x;
  for (int step = 0; step < 5; ++step) {
    transpose(turned.data(), now.data(), rows, cols);
    multiply(ctx, {gram.data(), now.data(), turned.data(), nullptr, rows, rows, cols, 1, 0});
    multiply(ctx, {poly.data(), gram.data(), gram.data(), gram.data(), rows, rows, rows, kC, kB});
    multiply(ctx, {next.data(), poly.data(), now.data(), now.data(), rows, cols, rows, 1, kA});
    std::swap(now, next);
  }
  if (now.data() != x.data()) {  // an odd number of steps ends in the other buffer
    std::copy(now.begin(), now.end(), x.begin());
  }
}

void muon(const ExecCtx& ctx, F32Mat w, F32Mat momentum, ConstF32Mat g, const MuonParams& p) {
  const std::int64_t rows = w.size(0);
  const std::int64_t cols = w.size(1);
  const bool tall = rows > cols;
  const FloatTag d;
  const ArenaScope scope(*ctx.workspace);
  const auto update = ctx.workspace->take<float>(rows * cols);
  const auto turned = ctx.workspace->take<float>(rows * cols);
  const auto mu = hn::Set(d, p.momentum);
  for (std::int64_t i = 0; i < rows; ++i) {
    for_each_vector(usize(cols), [&](std::size_t j, auto part) HWY_ATTR {
      const auto grad = hn::Mul(part.load(g.row(i) + j), hn::Set(d, p.grad_scale));
      const auto moved = hn::MulAdd(mu, part.load(momentum.row(i) + j), grad);
      part.store(moved, momentum.row(i) + j);
      part.store(hn::MulAdd(mu, moved, grad), &update[usize(i * cols)] + j);
    });
  }
  if (tall) {
    transpose(turned.data(), update.data(), rows, cols);
    orthogonalise(ctx, turned, cols, rows);
    transpose(update.data(), turned.data(), cols, rows);
  } else {
    orthogonalise(ctx, update, rows, cols);
  }
  const float scale = p.update_scale * std::sqrt(static_cast<float>(std::max(rows, cols)));
  for (std::int64_t i = 0; i < rows; ++i) {
    for_each_vector(usize(cols), [&](std::size_t j, auto part) HWY_ATTR {
      const auto weight = part.load(w.row(i) + j);
      const auto step = hn::Mul(hn::Set(d, scale), part.load(&update[usize(i * cols)] + j));
      const auto change = hn::MulAdd(hn::Set(d, p.weight_decay), weight, step);
      part.store(hn::NegMulAdd(hn::Set(d, p.lr), change, weight), w.row(i) + j);
    });
  }
}

OptimOps optim_ops() {
  return {.adamw = adamw, .muon = muon, .sum_squares = sum_squares};
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(optim_ops);
OptimOps cpu_optim_ops() {
  return HWY_DYNAMIC_DISPATCH(optim_ops)();
}

}  // namespace tandem
#endif  // HWY_ONCE
