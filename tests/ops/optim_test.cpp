#include "ops/optim.h"

#include "backends/cpu/families.h"
#include "ops/each_target.h"
#include "ops/op_checks.h"
#include "ops/op_table.h"
#include "ops/ref/optim_ref.h"

namespace tandem::test {
namespace {

std::span<float> span_of(Tensor& t) {
  return {t.data(), usize(t.numel())};
}

TEST(AdamW, HandNumber) {
  const PoisonedContext ctx;
  float w = 1;
  float m = 0;
  float v = 0;
  const float g = 0.1F;
  ops::adamw(*ctx, {&w, 1}, {&m, 1}, {&v, 1}, {&g, 1}, {.lr = 1e-3F, .weight_decay = 0.1F});
  EXPECT_NEAR(static_cast<double>(w), 0.9989, sum_tolerance(4, 1.0));
}

TEST(AdamW, MatchesTheOracleOverSteps) {
  const PoisonedContext ctx;
  for (const std::int64_t n : {1, 7, 15, 16, 17, 33, 128, 320, 40000}) {
    SCOPED_TRACE(n);
    Tensor w = Tensor::normal(n, 1);
    Tensor m = Tensor::filled(n, 0.0F);
    Tensor v = Tensor::filled(n, 0.0F);
    RefTensor w_ref(w.as_double());
    RefTensor m_ref = RefTensor::zeros(n);
    RefTensor v_ref = RefTensor::zeros(n);
    RefTensor undecayed = w_ref;
    AdamWParams params{.lr = 1e-2F, .weight_decay = 0.1F, .grad_scale = 0.5F};
    for (params.step = 1; params.step <= 4; ++params.step) {
      Tensor g = Tensor::normal(n, 10 + static_cast<std::uint64_t>(params.step));
      RefTensor g_ref(g.as_double());
      ops::adamw(*ctx, span_of(w), span_of(m), span_of(v), span_of(g), params);
      ref::adamw<double>(w_ref.vec(), m_ref.vec(), v_ref.vec(), g_ref.vec(), params);
    }
    // Per step: moments a few ulp each; the update is lr (m / sqrt(v) + decay w), where m / sqrt(v)
    // <= 1 / sqrt(1 - beta2) in magnitude and cancels in m; w one rounding.
    const double lr = static_cast<double>(params.lr);
    EXPECT_TRUE(close(m.data(), m_ref.values(), sum_tolerance(16, 2.0)));
    EXPECT_TRUE(close(v.data(), v_ref.values(), sum_tolerance(16, max_abs(v_ref.values()))));
    EXPECT_TRUE(close(w.data(), w_ref.values(),
                      sum_tolerance(8, max_abs(w_ref.values())) + sum_tolerance(64, 7.1 * lr)));
    EXPECT_TRUE(w.guards_intact() && m.guards_intact() && v.guards_intact());
    // Planted bug: no bias correction of the second moment at step 1.
    RefTensor one = undecayed;
    RefTensor zero = RefTensor::zeros(n);
    RefTensor zero_v = RefTensor::zeros(n);
    RefTensor g_ref = RefTensor::normal(n, 3);
    params.step = 1000;  // corrections of about 1
    ref::adamw<double>(one.vec(), zero.vec(), zero_v.vec(), g_ref.vec(), params);
    Tensor w1 = Tensor::normal(n, 1);
    Tensor m1 = Tensor::filled(n, 0.0F);
    Tensor v1 = Tensor::filled(n, 0.0F);
    Tensor g1(n);
    std::transform(g_ref.values().begin(), g_ref.values().end(), g1.begin(),
                   [](double x) { return static_cast<float>(x); });
    params.step = 1;
    ops::adamw(*ctx, span_of(w1), span_of(m1), span_of(v1), span_of(g1), params);
    EXPECT_FALSE(close(w1.data(), one.values(), sum_tolerance(72, 1.0)));
  }
}

TEST(SumSquares, MatchesDoubleArithmetic) {
  const PoisonedContext ctx;
  for (const std::int64_t n : {0, 1, 7, 17, 320, 4096, 4097, 100000}) {
    Tensor x = Tensor::normal(n, 1);
    const std::vector<double> values = x.as_double();
    const double expected = dot(values, values);
    // n roundings of double on a sum of positive terms.
    EXPECT_NEAR(ops::sum_squares(*ctx, span_of(x)), expected,
                expected * 2.3e-16 * static_cast<double>(n + 1));
  }
}

struct Shape {
  std::int64_t rows;
  std::int64_t cols;
};
constexpr Shape kShapes[] = {{1, 1},   {1, 7},   {7, 1},   {15, 16}, {16, 15},
                             {17, 33}, {33, 17}, {64, 64}, {40, 128}};

/// The state of `steps` Muon steps by the oracle in precision Real.
template <typename Real>
struct MuonRun {
  std::vector<Real> w;
  std::vector<Real> momentum;

  MuonRun(Shape shape, const MuonParams& params, std::uint64_t steps)
      : w(Rows::normal(shape.rows, shape.cols, 1).values<Real>()), momentum(w.size(), Real(0)) {
    const auto view = [shape](std::vector<Real>& v) {
      return TensorView<Real, 2>(v.data(), {shape.rows, shape.cols});
    };
    for (std::uint64_t step = 0; step < steps; ++step) {
      std::vector<Real> g = Rows::normal(shape.rows, shape.cols, 20 + step).values<Real>();
      ref::muon<Real>(view(w), view(momentum), view(g), params);
    }
  }
};

/// Newton-Schulz amplifies rounding by an amount that depends on the singular values, so the
/// yardstick is the error of the plain fp32 evaluation of the same formula: another summation order
/// may do four times worse, not more; plus the roundings of the last update of w.
double muon_tolerance(const MuonRun<float>& plain, const MuonRun<double>& exact) {
  double error = 0;
  for (std::size_t i = 0; i < exact.w.size(); ++i) {
    error = std::max(error, std::abs(static_cast<double>(plain.w[i]) - exact.w[i]));
  }
  return 4 * error + sum_tolerance(4, max_abs(exact.w));
}

TEST(Muon, MatchesTheOracleOverSteps) {
  const PoisonedContext ctx;
  for (const Shape shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.cols);
    const MuonParams params{.lr = 0.1F, .weight_decay = 0.01F, .grad_scale = 0.5F};
    Rows w = Rows::normal(shape.rows, shape.cols, 1, 1.0, 3);
    Rows momentum = Rows::filled(shape.rows, shape.cols, 0.0F, 2);
    for (std::uint64_t step = 0; step < 2; ++step) {
      Rows g = Rows::normal(shape.rows, shape.cols, 20 + step, 1.0, 1);
      ops::muon(*ctx, w.mat(), momentum.mat(), g.mat(), params);
    }
    const MuonRun<double> exact(shape, params, 2);
    const double tolerance = muon_tolerance(MuonRun<float>(shape, params, 2), exact);
    EXPECT_TRUE(close(momentum.values().data(), exact.momentum, sum_tolerance(8, 4.0)));
    EXPECT_TRUE(close(w.values().data(), exact.w, tolerance));
    EXPECT_TRUE(w.poison_intact() && momentum.poison_intact());
    if (shape.rows > 1 || shape.cols > 1) {  // planted bug: plain momentum 0.9 instead of 0.95
      MuonParams planted = params;
      planted.momentum = 0.9F;
      EXPECT_FALSE(close(w.values().data(), MuonRun<double>(shape, planted, 2).w, tolerance));
    }
  }
}

TEST(Muon, TheUpdateIsNearlyOrthogonal) {
  const PoisonedContext ctx;
  const std::int64_t rows = 24;
  const std::int64_t cols = 48;
  Rows w = Rows::filled(rows, cols, 0.0F);
  Rows momentum = Rows::filled(rows, cols, 0.0F);
  Rows g = Rows::normal(rows, cols, 1);
  // lr * 0.2 sqrt(48) = 1: w = -O.
  const MuonParams params{.lr = 1.0F / (0.2F * std::sqrt(48.0F))};
  ops::muon(*ctx, w.mat(), momentum.mat(), g.mat(), params);
  for (std::int64_t i = 0; i < rows; ++i) {
    double norm = 0;
    for (std::int64_t j = 0; j < cols; ++j) {
      norm += std::pow(static_cast<double>(w.row(i)[j]), 2);
    }
    // These coefficients bring singular values into about [0.68, 1.14], not to 1.
    EXPECT_GT(norm, 0.68 * 0.68);
    EXPECT_LT(norm, 1.15 * 1.15);
  }
}

TEST(Muon, AZeroGradientIsHarmless) {
  const PoisonedContext ctx;
  Rows w = Rows::normal(5, 9, 1);
  const std::vector<float> before = w.values();
  Rows momentum = Rows::filled(5, 9, 0.0F);
  Rows g = Rows::filled(5, 9, 0.0F);
  ops::muon(*ctx, w.mat(), momentum.mat(), g.mat(), {});
  EXPECT_EQ(w.values(), before);
}

TEST(Optim, SameBitsForAnyThreadCount) {
  expect_same_for_any_thread_count([](const ExecCtx& ctx) {
    Tensor w = Tensor::normal(50000, 1);
    Tensor m = Tensor::normal(50000, 2);
    Tensor v = Tensor::filled(50000, 0.5F);
    Tensor g = Tensor::normal(50000, 3);
    ops::adamw(ctx, span_of(w), span_of(m), span_of(v), span_of(g), {.step = 3});
    std::vector<float> all{w.begin(), w.end()};
    append(all, {m.begin(), m.end()});
    append(all, {v.begin(), v.end()});
    const double squares = ops::sum_squares(ctx, span_of(g));
    append(all, {static_cast<float>(squares),
                 static_cast<float>(squares - static_cast<double>(static_cast<float>(squares)))});
    Rows matrix = Rows::normal(70, 130, 1);
    Rows momentum = Rows::normal(70, 130, 2);
    Rows gradient = Rows::normal(70, 130, 3);
    ops::muon(ctx, matrix.mat(), momentum.mat(), gradient.mat(), {});
    append(all, matrix.values());
    append(all, momentum.values());
    return all;
  });
}

TEST(Optim, EveryInstructionSetIsWithinTheBound) {
  const PoisonedContext ctx;
  const Shape shape{17, 33};
  const MuonRun<double> exact(shape, {}, 1);
  const double tolerance = muon_tolerance(MuonRun<float>(shape, {}, 1), exact);
  for_each_simd_target([&](const char* target) {
    const OptimOps table = cpu_optim_ops();
    Rows w = Rows::normal(17, 33, 1);
    Rows momentum = Rows::filled(17, 33, 0.0F);
    Rows g = Rows::normal(17, 33, 20);
    table.muon(*ctx, w.mat(), momentum.mat(), g.mat(), {});
    EXPECT_TRUE(close(w.values().data(), exact.w, tolerance)) << target;
    Tensor one = Tensor::normal(33, 5);
    const std::vector<double> values = one.as_double();
    EXPECT_NEAR(table.sum_squares(*ctx, span_of(one)), dot(values, values), 1e-13) << target;
  });
}

}  // namespace
}  // namespace tandem::test
