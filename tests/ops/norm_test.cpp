#include "ops/norm.h"

#include <array>

#include "backends/cpu/families.h"
#include "ops/each_target.h"
#include "ops/op_checks.h"
#include "ops/op_table.h"
#include "ops/ref/norm_ref.h"

namespace tandem::test {
namespace {

constexpr float kEps = 1e-5F;
constexpr std::int64_t kRows = 5;
constexpr std::int64_t kHeads = 3;  // kRows * kHeads rows in the per-head ops

double eps() {
  return static_cast<double>(kEps);
}

TEST(RmsNorm, MatchesTheOracle) {
  const PoisonedContext ctx;
  for (const std::int64_t dim : kWidths) {
    for (const std::int64_t pad : {0, 5}) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << " pad " << pad);
      Rows x = Rows::normal(kRows, dim, 1, 2.0, pad);
      Tensor w = Tensor::normal(dim, 2);
      Rows y(kRows, dim, pad);
      ops::rms_norm(*ctx, y.mat(), x.mat(), w.vec(), kEps);
      RefTensor expected = RefTensor::zeros(kRows * dim);
      RefTensor x_ref(x.values<double>());
      RefTensor w_ref(w.as_double());
      ref::rms_norm<double>(expected.mat(dim), x_ref.mat(dim), w_ref.vec(), eps());
      // The row sum is relative (all terms positive); the scale and two products add a few ulp.
      const double tolerance = sum_tolerance(dim, max_abs(expected.values()));
      EXPECT_TRUE(close(y.values().data(), expected.values(), tolerance));
      EXPECT_TRUE(y.poison_intact());
      if (dim > 1) {  // planted bug: an unbiased mean
        const double n = static_cast<double>(dim);
        for (double& v : expected.values()) {
          v *= std::sqrt((n - 1) / n);
        }
        EXPECT_FALSE(close(y.values().data(), expected.values(), tolerance));
      }
    }
  }
}

TEST(RmsNorm, BackwardMatchesTheOracle) {
  const PoisonedContext ctx;
  for (const std::int64_t dim : kWidths) {
    for (const std::int64_t pad : {0, 5}) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << " pad " << pad);
      const std::int64_t rows = 40;
      Rows x = Rows::normal(rows, dim, 1, 2.0, pad);
      Rows d_y = Rows::normal(rows, dim, 3, 1.0, pad);
      Tensor w = Tensor::normal(dim, 2);
      Rows d_x(rows, dim, pad);
      Tensor d_w = Tensor::filled(dim, 0.5F);
      ops::rms_norm_bwd(*ctx, d_x.mat(), d_w.vec(), d_y.mat(), x.mat(), w.vec(), kEps);
      RefTensor x_ref(x.values<double>());
      RefTensor d_y_ref(d_y.values<double>());
      RefTensor w_ref(w.as_double());
      RefTensor e_x = RefTensor::zeros(rows * dim);
      RefTensor e_w(std::vector<double>(usize(dim), 0.5));
      ref::rms_norm_bwd<double>(e_x.mat(dim), e_w.vec(), d_y_ref.mat(dim), x_ref.mat(dim),
                                w_ref.vec(), eps());
      // Magnitudes of the sums: the oracle on absolute values for d_w; for d_x the two terms of
      // scale * (d_n - n mean) with |scale| <= eps^-1/2 at worst, here measured per row below.
      RefTensor m_x = RefTensor::zeros(rows * dim);
      RefTensor m_w(std::vector<double>(usize(dim), 0.5));
      RefTensor ax = x_ref.abs();
      RefTensor ady = d_y_ref.abs();
      RefTensor aw = w_ref.abs();
      ref::rms_norm_bwd<double>(m_x.mat(dim), m_w.vec(), ady.mat(dim), ax.mat(dim), aw.vec(),
                                eps());
      double magnitude = 0;
      for (std::int64_t t = 0; t < rows; ++t) {
        const double scale = ref::rms_scale<double>(ref::row_of<double>(ax.mat(dim), t), eps());
        double largest = 0;
        double mean = 0;
        double n_max = 0;
        for (std::int64_t i = 0; i < dim; ++i) {
          const double d_n = ady.mat(dim)(t, i) * aw.vec()(i);
          const double n = ax.mat(dim)(t, i) * scale;
          largest = std::max(largest, d_n);
          n_max = std::max(n_max, n);
          mean += d_n * n / static_cast<double>(dim);
        }
        magnitude = std::max(magnitude, scale * (largest + n_max * mean));
      }
      EXPECT_TRUE(close(d_x.values().data(), e_x.values(), sum_tolerance(dim, magnitude)));
      EXPECT_TRUE(
          close(d_w.data(), e_w.values(), sum_tolerance(rows + dim, max_abs(m_w.values()))));
      EXPECT_TRUE(d_x.poison_intact() && d_w.guards_intact());
      // Planted bug: the gradient through the mean forgotten.
      for (std::int64_t t = 0; t < rows; ++t) {
        const double scale = ref::rms_scale<double>(ref::row_of<double>(ax.mat(dim), t), eps());
        for (std::int64_t i = 0; i < dim; ++i) {
          e_x.mat(dim)(t, i) = scale * d_y_ref.mat(dim)(t, i) * w_ref.vec()(i);
        }
      }
      EXPECT_FALSE(close(d_x.values().data(), e_x.values(), sum_tolerance(dim, magnitude)));
    }
  }
}

TEST(RmsNorm, OracleGradientIsTheDerivative) {
  const std::int64_t rows = 2;
  const std::int64_t dim = 7;
  RefTensor x = RefTensor::normal(rows * dim, 11);
  RefTensor w = RefTensor::normal(dim, 12);
  RefTensor d_y = RefTensor::normal(rows * dim, 13);
  RefTensor d_x = RefTensor::zeros(rows * dim);
  RefTensor d_w = RefTensor::zeros(dim);
  ref::rms_norm_bwd<double>(d_x.mat(dim), d_w.vec(), d_y.mat(dim), x.mat(dim), w.vec(), 1e-3);
  const auto loss = [&] {
    RefTensor y = RefTensor::zeros(rows * dim);
    ref::rms_norm<double>(y.mat(dim), x.mat(dim), w.vec(), 1e-3);
    return dot(y.values(), d_y.values());
  };
  expect_central_differences(loss, x, d_x, "d_x");
  expect_central_differences(loss, w, d_w, "d_w");
}

TEST(RmsNormGated, HandNumbers) {
  const PoisonedContext ctx;
  Rows o(1, 4);
  Rows gate(1, 4);
  Rows y(1, 4);
  Tensor w(4);
  const float o_in[] = {1, -2, 0.5F, 3};
  const float g_in[] = {0, 1, -1, 2};
  const float w_in[] = {1, 1.5F, 0.5F, 1};
  std::copy_n(o_in, 4, o.row(0));
  std::copy_n(g_in, 4, gate.row(0));
  std::copy_n(w_in, 4, w.data());
  ops::rms_norm_gated(*ctx, y.cube(1), o.cube(1), gate.cube(1), w.vec(), kEps);
  const std::vector<double> expected{0.2649061, -1.16197126, 0.03562211, 1.39997111};
  EXPECT_TRUE(close(y.row(0), expected, sum_tolerance(4, 1.4)));
}

TEST(RmsNormGated, MatchesTheOracle) {
  const PoisonedContext ctx;
  for (const std::int64_t dim : kWidths) {
    for (const std::int64_t pad : {0, 3}) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << " pad " << pad);
      const std::int64_t rows = kRows * kHeads;
      Rows o = Rows::normal(rows, dim, 1, 1.0, pad);
      Rows gate = Rows::normal(rows, dim, 4, 3.0, pad);
      Tensor w = Tensor::normal(dim, 2);
      Rows y(rows, dim, pad);
      ops::rms_norm_gated(*ctx, y.cube(kHeads), o.cube(kHeads), gate.cube(kHeads), w.vec(), kEps);
      RefTensor o_ref(o.values<double>());
      RefTensor gate_ref(gate.values<double>());
      RefTensor w_ref(w.as_double());
      RefTensor expected = RefTensor::zeros(rows * dim);
      ref::rms_norm_gated<double>(expected.cube(kHeads, dim), o_ref.cube(kHeads, dim),
                                  gate_ref.cube(kHeads, dim), w_ref.vec(), eps());
      const double tolerance = sum_tolerance(dim, max_abs(expected.values()));
      EXPECT_TRUE(close(y.values().data(), expected.values(), tolerance));
      EXPECT_TRUE(y.poison_intact());
      // Planted bug: SiLU instead of the sigmoid.
      for (std::size_t i = 0; i < expected.values().size(); ++i) {
        expected.values()[i] *= gate_ref.values()[i];
      }
      EXPECT_FALSE(close(y.values().data(), expected.values(), tolerance));
    }
  }
}

/// Outputs of the gated backward on fixed inputs of `tokens` tokens.
std::vector<float> gated_bwd(const ExecCtx& ctx, std::int64_t tokens, std::int64_t dim) {
  const std::int64_t rows = tokens * kHeads;
  Rows o = Rows::normal(rows, dim, 1);
  Rows gate = Rows::normal(rows, dim, 4, 2.0);
  Rows d_y = Rows::normal(rows, dim, 3);
  Tensor w = Tensor::normal(dim, 2);
  Rows d_o(rows, dim);
  Rows d_gate(rows, dim);
  Tensor d_w = Tensor::filled(dim, 0.0F);
  ops::rms_norm_gated_bwd(ctx, d_o.cube(kHeads), d_gate.cube(kHeads), d_w.vec(), d_y.cube(kHeads),
                          o.cube(kHeads), gate.cube(kHeads), w.vec(), kEps);
  EXPECT_TRUE(d_o.poison_intact() && d_gate.poison_intact() && d_w.guards_intact());
  std::vector<float> all = d_o.values();
  append(all, d_gate.values());
  append(all, {d_w.begin(), d_w.end()});
  return all;
}

TEST(RmsNormGated, BackwardMatchesTheOracle) {
  const PoisonedContext ctx;
  for (const std::int64_t dim : kWidths) {
    SCOPED_TRACE(dim);
    const std::int64_t tokens = 20;
    const std::int64_t rows = tokens * kHeads;
    const std::vector<float> actual = gated_bwd(*ctx, tokens, dim);
    RefTensor o(Rows::normal(rows, dim, 1).values<double>());
    RefTensor gate(Rows::normal(rows, dim, 4, 2.0).values<double>());
    RefTensor d_y(Rows::normal(rows, dim, 3).values<double>());
    RefTensor w(Tensor::normal(dim, 2).as_double());
    RefTensor d_o = RefTensor::zeros(rows * dim);
    RefTensor d_gate = RefTensor::zeros(rows * dim);
    RefTensor d_w = RefTensor::zeros(dim);
    ref::rms_norm_gated_bwd<double>(d_o.cube(kHeads, dim), d_gate.cube(kHeads, dim), d_w.vec(),
                                    d_y.cube(kHeads, dim), o.cube(kHeads, dim),
                                    gate.cube(kHeads, dim), w.vec(), eps());
    // scale <= (o^2 / dim)^-1/2: the smallest row norm bounds it; |n| <= sqrt(dim).
    double scale = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      scale = std::max(scale, ref::rms_scale<double>(ref::row_of<double>(o.mat(dim), r), eps()));
    }
    const double d_n = max_abs(d_y.values()) * max_abs(w.values());
    const double n_max = std::min(std::sqrt(static_cast<double>(dim)), scale * max_abs(o.values()));
    const std::int64_t size = rows * dim;
    EXPECT_TRUE(close(actual.data(), d_o.values(), sum_tolerance(dim, scale * d_n * (1 + n_max))));
    EXPECT_TRUE(close(actual.data() + size, d_gate.values(), sum_tolerance(dim, d_n * n_max)));
    // Planted bug: the gate's gradient without w.
    for (std::int64_t i = 0; i < size; ++i) {
      d_gate.values()[usize(i)] /= w.values()[usize(i % dim)];
    }
    EXPECT_FALSE(close(actual.data() + size, d_gate.values(), sum_tolerance(dim, d_n * n_max)));
    EXPECT_TRUE(close(
        actual.data() + 2 * size, d_w.values(),
        sum_tolerance(rows + dim, static_cast<double>(rows) * n_max * max_abs(d_y.values()))));
  }
}

TEST(RmsNormGated, OracleGradientIsTheDerivative) {
  const std::int64_t dim = 5;
  const std::int64_t heads = 2;
  RefTensor o = RefTensor::normal(2 * heads * dim, 21);
  RefTensor gate = RefTensor::normal(2 * heads * dim, 22);
  RefTensor w = RefTensor::normal(dim, 23);
  RefTensor d_y = RefTensor::normal(2 * heads * dim, 24);
  RefTensor d_o = RefTensor::zeros(2 * heads * dim);
  RefTensor d_gate = RefTensor::zeros(2 * heads * dim);
  RefTensor d_w = RefTensor::zeros(dim);
  ref::rms_norm_gated_bwd<double>(d_o.cube(heads, dim), d_gate.cube(heads, dim), d_w.vec(),
                                  d_y.cube(heads, dim), o.cube(heads, dim), gate.cube(heads, dim),
                                  w.vec(), 1e-3);
  const auto loss = [&] {
    RefTensor y = RefTensor::zeros(2 * heads * dim);
    ref::rms_norm_gated<double>(y.cube(heads, dim), o.cube(heads, dim), gate.cube(heads, dim),
                                w.vec(), 1e-3);
    return dot(y.values(), d_y.values());
  };
  expect_central_differences(loss, o, d_o, "d_o");
  expect_central_differences(loss, gate, d_gate, "d_gate");
  expect_central_differences(loss, w, d_w, "d_w");
}

TEST(L2Norm, MatchesTheOracleInPlace) {
  const PoisonedContext ctx;
  for (const std::int64_t dim : kWidths) {
    for (const std::int64_t pad : {0, 3}) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << " pad " << pad);
      const std::int64_t rows = kRows * kHeads;
      const float factor = 1.0F / std::sqrt(static_cast<float>(dim));
      Rows x = Rows::normal(rows, dim, 1, 1.0, pad);
      RefTensor x_ref(x.values<double>());
      RefTensor expected = RefTensor::zeros(rows * dim);
      ref::l2_norm<double>(expected.cube(kHeads, dim), x_ref.cube(kHeads, dim),
                           static_cast<double>(factor), 1e-6);
      ops::l2_norm(*ctx, x.cube(kHeads), x.cube(kHeads), {&factor, 1}, 1e-6F);
      const double tolerance = sum_tolerance(dim, max_abs(expected.values()));
      EXPECT_TRUE(close(x.values().data(), expected.values(), tolerance));
      EXPECT_TRUE(x.poison_intact());
      if (dim > 1) {  // planted bug: mean instead of sum
        for (double& v : expected.values()) {
          v *= std::sqrt(static_cast<double>(dim));
        }
        EXPECT_FALSE(close(x.values().data(), expected.values(), tolerance));
      }
    }
  }
}

TEST(L2Norm, AScaleABlockOfHeads) {
  const TestContext ctx;
  const std::int64_t rows = 5;
  for (const std::int64_t dim : {128, 33}) {
    for (const std::vector<float>& scales :
         {std::vector<float>{0.5F, 1.0F}, std::vector<float>{2.0F, 0.25F, 1.0F, 3.0F}}) {
      const std::int64_t blocks = isize(scales);
      const std::int64_t heads = 3 * blocks;
      Tensor x = Tensor::normal(rows * heads * dim, 1);
      Tensor y(x.numel());
      Tensor expected(x.numel());
      ops::l2_norm(*ctx, y.cube(rows, heads, dim), x.cube(rows, heads, dim), scales, 1e-6F);
      for (std::int64_t block = 0; block < blocks; ++block) {
        const auto of_block = [&](Tensor& t) {
          return F32Cube{t.data() + block * 3 * dim, {rows, 3, dim}, {heads * dim, dim, 1}};
        };
        ops::l2_norm(*ctx, of_block(expected), of_block(x), {&scales[usize(block)], 1}, 1e-6F);
      }
      EXPECT_TRUE(y.guards_intact());
      EXPECT_TRUE(same_bits(y.data(), expected.data(), y.numel()));
    }
  }
}

TEST(L2Norm, BackwardMatchesTheOracleInPlace) {
  const PoisonedContext ctx;
  for (const std::int64_t dim : kWidths) {
    SCOPED_TRACE(dim);
    const std::int64_t rows = kRows * kHeads;
    Rows x = Rows::normal(rows, dim, 1);
    Rows d_y = Rows::normal(rows, dim, 3);
    RefTensor x_ref(x.values<double>());
    RefTensor d_y_ref(d_y.values<double>());
    RefTensor expected = RefTensor::zeros(rows * dim);
    ref::l2_norm_bwd<double>(expected.cube(kHeads, dim), d_y_ref.cube(kHeads, dim),
                             x_ref.cube(kHeads, dim), 0.25, 1e-6);
    ops::l2_norm_bwd(*ctx, d_y.cube(kHeads), d_y.cube(kHeads), x.cube(kHeads), 0.25F, 1e-6F);
    double rho = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      double sum = 1e-6;
      for (std::int64_t i = 0; i < dim; ++i) {
        sum += x_ref.mat(dim)(r, i) * x_ref.mat(dim)(r, i);
      }
      rho = std::max(rho, 1 / std::sqrt(sum));
    }
    // |y (y . d_y)| <= |d_y|_2 <= sqrt(dim) max|d_y|.
    const double magnitude =
        0.25 * rho * max_abs(d_y_ref.values()) * (1 + std::sqrt(static_cast<double>(dim)));
    EXPECT_TRUE(close(d_y.values().data(), expected.values(), sum_tolerance(dim, magnitude)));
    // Planted bug: eps of the size of an RMS, not of a sum.
    ref::l2_norm_bwd<double>(expected.cube(kHeads, dim), d_y_ref.cube(kHeads, dim),
                             x_ref.cube(kHeads, dim), 0.25, 1e-2 * static_cast<double>(dim));
    EXPECT_FALSE(close(d_y.values().data(), expected.values(), sum_tolerance(dim, magnitude)));
  }
}

TEST(L2Norm, OracleGradientIsTheDerivative) {
  const std::int64_t dim = 6;
  RefTensor x = RefTensor::normal(4 * dim, 31);
  RefTensor d_y = RefTensor::normal(4 * dim, 32);
  RefTensor d_x = RefTensor::zeros(4 * dim);
  ref::l2_norm_bwd<double>(d_x.cube(2, dim), d_y.cube(2, dim), x.cube(2, dim), 0.7, 1e-2);
  const auto loss = [&] {
    RefTensor y = RefTensor::zeros(4 * dim);
    ref::l2_norm<double>(y.cube(2, dim), x.cube(2, dim), 0.7, 1e-2);
    return dot(y.values(), d_y.values());
  };
  expect_central_differences(loss, x, d_x, "d_x");
}

std::vector<float> all_norms(const ExecCtx& ctx, std::int64_t tokens, std::int64_t dim) {
  const std::int64_t rows = tokens * kHeads;
  Rows x = Rows::normal(rows, dim, 1);
  Rows d_y = Rows::normal(rows, dim, 3);
  Tensor w = Tensor::normal(dim, 2);
  Rows y(rows, dim);
  Tensor d_w = Tensor::filled(dim, 0.0F);
  ops::rms_norm(ctx, y.mat(), x.mat(), w.vec(), kEps);
  std::vector<float> all = y.values();
  ops::rms_norm_bwd(ctx, y.mat(), d_w.vec(), d_y.mat(), x.mat(), w.vec(), kEps);
  append(all, y.values());
  append(all, {d_w.begin(), d_w.end()});
  append(all, gated_bwd(ctx, tokens, dim));
  ops::rms_norm_gated(ctx, y.cube(kHeads), x.cube(kHeads), d_y.cube(kHeads), w.vec(), kEps);
  append(all, y.values());
  ops::l2_norm(ctx, y.cube(kHeads), x.cube(kHeads), std::array{0.5F}, 1e-6F);
  append(all, y.values());
  ops::l2_norm_bwd(ctx, y.cube(kHeads), d_y.cube(kHeads), x.cube(kHeads), 0.5F, 1e-6F);
  append(all, y.values());
  return all;
}

TEST(Norm, SameBitsForAnyThreadCount) {
  expect_same_for_any_thread_count(
      [](const ExecCtx& ctx) { return all_norms(ctx, 300, 129); });  // several blocks
  expect_same_for_any_thread_count([](const ExecCtx& ctx) { return all_norms(ctx, 0, 16); });
}

TEST(Norm, ARowDoesNotDependOnTheOthers) {
  const PoisonedContext ctx;
  const std::int64_t dim = 77;
  const std::int64_t rows = 500;
  Rows x = Rows::normal(rows, dim, 1);
  Tensor w = Tensor::normal(dim, 2);
  Rows batch(rows, dim);
  Rows alone(1, dim, 3);
  ops::rms_norm(*ctx, batch.mat(), x.mat(), w.vec(), kEps);
  for (const std::int64_t r : {0, 1, 250, 499}) {
    ops::rms_norm(*ctx, alone.mat(), F32Mat(x.row(r), {1, dim}), w.vec(), kEps);
    EXPECT_TRUE(same_bits(alone.row(0), batch.row(r), dim)) << r;
  }
  ops::rms_norm_gated(*ctx, batch.cube(1), x.cube(1), x.cube(1), w.vec(), kEps);
  for (const std::int64_t r : {0, 1, 250, 499}) {
    const F32Cube row(x.row(r), {1, 1, dim});
    ops::rms_norm_gated(*ctx, alone.cube(1), row, row, w.vec(), kEps);
    EXPECT_TRUE(same_bits(alone.row(0), batch.row(r), dim)) << r;
  }
}

TEST(Norm, EveryInstructionSetIsWithinTheBound) {
  const PoisonedContext ctx;
  const std::int64_t dim = 33;
  Rows x = Rows::normal(kRows, dim, 1);
  Tensor w = Tensor::normal(dim, 2);
  RefTensor x_ref(x.values<double>());
  RefTensor w_ref(w.as_double());
  RefTensor expected = RefTensor::zeros(kRows * dim);
  ref::rms_norm<double>(expected.mat(dim), x_ref.mat(dim), w_ref.vec(), eps());
  for_each_simd_target([&](const char* target) {
    Rows y(kRows, dim);
    cpu_norm_ops().rms_norm(*ctx, y.mat(), x.mat(), w.vec(), kEps);
    EXPECT_TRUE(
        close(y.values().data(), expected.values(), sum_tolerance(dim, max_abs(expected.values()))))
        << target;
  });
}

}  // namespace
}  // namespace tandem::test
