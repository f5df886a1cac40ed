#include "ops/act.h"

#include "backends/cpu/families.h"
#include "ops/each_target.h"
#include "ops/op_checks.h"
#include "ops/op_table.h"
#include "ops/ref/act_ref.h"

namespace tandem::test {
namespace {

constexpr std::int64_t kRows = 5;
constexpr SituParams kParams[] = {{4.0F, 25.0F}, {1.5F, 0.0F}};

ref::Situ<double> oracle(SituParams p) {
  return {static_cast<double>(p.beta), static_cast<double>(p.linear_beta)};
}

/// No sums here: at most four functions of <= 3 ulp and six roundings, and g / beta, u / lambda
/// rounded twice where |x tanh'(x)| <= |tanh(x)|: 16 ulp of the result covers them.
double elementwise_tolerance(double magnitude) {
  return sum_tolerance(24, magnitude);
}

TEST(Situ, HandNumbers) {
  const PoisonedContext ctx;
  const float g[] = {1, -1, 0.5F, 10, -8, 6};
  const float u[] = {1, 2, -30, 10, 4, 50};
  const std::vector<double> expected{0.715817828,  -0.525828896, -6.452877335,
                                     37.484606074, -0.005128896, 87.043029957};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    float y = 0;
    ops::situ(*ctx, {&y, {1, 1}}, {&g[i], {1, 1}}, {&u[i], {1, 1}}, {});
    EXPECT_NEAR(static_cast<double>(y), expected[i], elementwise_tolerance(std::abs(expected[i])));
  }
}

TEST(Situ, MatchesTheOracle) {
  const PoisonedContext ctx;
  for (const SituParams params : kParams) {
    for (const std::int64_t dim : kWidths) {
      for (const std::int64_t pad : {0, 5}) {
        SCOPED_TRACE(testing::Message() << "dim " << dim << " pad " << pad);
        Rows gate = Rows::normal(kRows, dim, 1, 5.0, pad);
        Rows up = Rows::normal(kRows, dim, 2, 20.0, pad);
        Rows y(kRows, dim, pad);
        ops::situ(*ctx, y.mat(), gate.mat(), up.mat(), params);
        RefTensor gate_ref(gate.values<double>());
        RefTensor up_ref(up.values<double>());
        RefTensor expected = RefTensor::zeros(kRows * dim);
        ref::situ<double>(expected.mat(dim), gate_ref.mat(dim), up_ref.mat(dim), oracle(params));
        const double tolerance = elementwise_tolerance(max_abs(expected.values()));
        EXPECT_TRUE(close(y.values().data(), expected.values(), tolerance));
        EXPECT_TRUE(y.poison_intact());
        // Planted bug: gate and up swapped.
        ref::situ<double>(expected.mat(dim), up_ref.mat(dim), gate_ref.mat(dim), oracle(params));
        EXPECT_FALSE(close(y.values().data(), expected.values(), tolerance));
        // In place, on the gate.
        ops::situ(*ctx, gate.mat(), gate.mat(), up.mat(), params);
        EXPECT_EQ(gate.values(), y.values());
      }
    }
  }
}

TEST(Situ, BackwardMatchesTheOracleInPlace) {
  const PoisonedContext ctx;
  for (const SituParams params : kParams) {
    for (const std::int64_t dim : kWidths) {
      SCOPED_TRACE(dim);
      Rows gate = Rows::normal(kRows, dim, 1, 3.0, 3);
      Rows up = Rows::normal(kRows, dim, 2, 10.0, 3);
      Rows d_up = Rows::normal(kRows, dim, 3, 1.0, 3);  // d_y on entry
      Rows d_gate(kRows, dim, 3);
      RefTensor gate_ref(gate.values<double>());
      RefTensor up_ref(up.values<double>());
      RefTensor d_y_ref(d_up.values<double>());
      RefTensor e_gate = RefTensor::zeros(kRows * dim);
      RefTensor e_up = RefTensor::zeros(kRows * dim);
      ref::situ_bwd<double>(e_gate.mat(dim), e_up.mat(dim), d_y_ref.mat(dim), gate_ref.mat(dim),
                            up_ref.mat(dim), oracle(params));
      ops::situ_bwd(*ctx, d_gate.mat(), d_up.mat(), d_up.mat(), gate.mat(), up.mat(), params);
      // 1 - tanh^2 is absolute to 1, times |d_y| and at most max|u| or beta.
      const double d_y = max_abs(d_y_ref.values());
      EXPECT_TRUE(close(d_gate.values().data(), e_gate.values(),
                        elementwise_tolerance(d_y * max_abs(up_ref.values()))));
      EXPECT_TRUE(close(d_up.values().data(), e_up.values(),
                        elementwise_tolerance(d_y * static_cast<double>(params.beta))));
      EXPECT_TRUE(d_gate.poison_intact() && d_up.poison_intact());
      // Planted bug: the two gradients swapped.
      EXPECT_FALSE(close(d_gate.values().data(), e_up.values(),
                         elementwise_tolerance(d_y * max_abs(up_ref.values()))));
    }
  }
}

TEST(Situ, OracleGradientIsTheDerivative) {
  for (const SituParams params : kParams) {
    RefTensor gate = RefTensor::normal(12, 1, 2.0);
    RefTensor up = RefTensor::normal(12, 2, 2.0);
    RefTensor d_y = RefTensor::normal(12, 3);
    RefTensor d_gate = RefTensor::zeros(12);
    RefTensor d_up = RefTensor::zeros(12);
    ref::situ_bwd<double>(d_gate.mat(4), d_up.mat(4), d_y.mat(4), gate.mat(4), up.mat(4),
                          oracle(params));
    const auto loss = [&] {
      RefTensor y = RefTensor::zeros(12);
      ref::situ<double>(y.mat(4), gate.mat(4), up.mat(4), oracle(params));
      return dot(y.values(), d_y.values());
    };
    expect_central_differences(loss, gate, d_gate, "d_gate");
    expect_central_differences(loss, up, d_up, "d_up");
  }
}

TEST(SigmoidGate, MatchesTheOracle) {
  const PoisonedContext ctx;
  for (const std::int64_t dim : kWidths) {
    SCOPED_TRACE(dim);
    Rows o = Rows::normal(kRows, dim, 1, 1.0, 3);
    Rows gate = Rows::normal(kRows, dim, 2, 4.0, 3);
    Rows d_y = Rows::normal(kRows, dim, 3, 1.0, 3);
    Rows y(kRows, dim, 3);
    Rows d_o(kRows, dim, 3);
    Rows d_gate(kRows, dim, 3);
    ops::sigmoid_gate(*ctx, y.mat(), o.mat(), gate.mat());
    ops::sigmoid_gate_bwd(*ctx, d_o.mat(), d_gate.mat(), d_y.mat(), o.mat(), gate.mat());
    RefTensor o_ref(o.values<double>());
    RefTensor gate_ref(gate.values<double>());
    RefTensor d_y_ref(d_y.values<double>());
    RefTensor e_y = RefTensor::zeros(kRows * dim);
    RefTensor e_o = RefTensor::zeros(kRows * dim);
    RefTensor e_gate = RefTensor::zeros(kRows * dim);
    ref::sigmoid_gate<double>(e_y.mat(dim), o_ref.mat(dim), gate_ref.mat(dim));
    ref::sigmoid_gate_bwd<double>(e_o.mat(dim), e_gate.mat(dim), d_y_ref.mat(dim), o_ref.mat(dim),
                                  gate_ref.mat(dim));
    const auto tolerance = [](const RefTensor& e) { return sum_tolerance(8, max_abs(e.values())); };
    EXPECT_TRUE(close(y.values().data(), e_y.values(), tolerance(e_y)));
    EXPECT_TRUE(close(d_o.values().data(), e_o.values(), tolerance(e_o)));
    EXPECT_TRUE(close(d_gate.values().data(), e_gate.values(), tolerance(e_gate)));
    EXPECT_TRUE(y.poison_intact() && d_o.poison_intact() && d_gate.poison_intact());
    // Planted bug: the derivative of the sigmoid without its (1 - s).
    for (std::size_t i = 0; i < e_gate.values().size(); ++i) {
      e_gate.values()[i] *= 1 + std::exp(gate_ref.values()[i]);
    }
    EXPECT_FALSE(close(d_gate.values().data(), e_gate.values(), tolerance(e_gate)));
    const std::vector<float> apart = y.values();
    ops::sigmoid_gate(*ctx, o.mat(), o.mat(), gate.mat());
    EXPECT_EQ(o.values(), apart);
  }
}

TEST(SigmoidGate, OracleGradientIsTheDerivative) {
  RefTensor o = RefTensor::normal(12, 1);
  RefTensor gate = RefTensor::normal(12, 2, 2.0);
  RefTensor d_y = RefTensor::normal(12, 3);
  RefTensor d_o = RefTensor::zeros(12);
  RefTensor d_gate = RefTensor::zeros(12);
  ref::sigmoid_gate_bwd<double>(d_o.mat(4), d_gate.mat(4), d_y.mat(4), o.mat(4), gate.mat(4));
  const auto loss = [&] {
    RefTensor y = RefTensor::zeros(12);
    ref::sigmoid_gate<double>(y.mat(4), o.mat(4), gate.mat(4));
    return dot(y.values(), d_y.values());
  };
  expect_central_differences(loss, o, d_o, "d_o");
  expect_central_differences(loss, gate, d_gate, "d_gate");
}

TEST(Add, IsTheExactSumInPlaceToo) {
  const PoisonedContext ctx;
  for (const std::int64_t dim : kWidths) {
    Rows a = Rows::normal(kRows, dim, 1, 1.0, 3);
    Rows b = Rows::normal(kRows, dim, 2, 1.0, 0);
    Rows y(kRows, dim, 5);
    ops::add(*ctx, y.mat(), a.mat(), b.mat());
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (std::int64_t c = 0; c < dim; ++c) {
        ASSERT_EQ(y.row(r)[c], a.row(r)[c] + b.row(r)[c]);
      }
    }
    EXPECT_TRUE(y.poison_intact());
    ops::add(*ctx, b.mat(), a.mat(), b.mat());
    EXPECT_EQ(b.values(), y.values());
  }
}

std::vector<float> all_acts(const ExecCtx& ctx, std::int64_t rows, std::int64_t dim) {
  Rows a = Rows::normal(rows, dim, 1, 3.0);
  Rows b = Rows::normal(rows, dim, 2, 3.0);
  Rows d_y = Rows::normal(rows, dim, 3);
  Rows y(rows, dim);
  Rows z(rows, dim);
  ops::situ(ctx, y.mat(), a.mat(), b.mat(), {});
  std::vector<float> all = y.values();
  ops::situ_bwd(ctx, y.mat(), z.mat(), d_y.mat(), a.mat(), b.mat(), {});
  append(all, y.values());
  append(all, z.values());
  ops::sigmoid_gate(ctx, y.mat(), a.mat(), b.mat());
  append(all, y.values());
  ops::sigmoid_gate_bwd(ctx, y.mat(), z.mat(), d_y.mat(), a.mat(), b.mat());
  append(all, y.values());
  append(all, z.values());
  ops::add(ctx, y.mat(), a.mat(), b.mat());
  append(all, y.values());
  return all;
}

TEST(Act, SameBitsForAnyThreadCount) {
  expect_same_for_any_thread_count(
      [](const ExecCtx& ctx) { return all_acts(ctx, 400, 129); });  // several blocks
  expect_same_for_any_thread_count([](const ExecCtx& ctx) { return all_acts(ctx, 0, 16); });
}

TEST(Act, AnElementDoesNotDependOnItsPlace) {
  const PoisonedContext ctx;
  Rows gate = Rows::normal(1, 100, 1, 4.0);
  Rows up = Rows::normal(1, 100, 2, 4.0);
  Rows y(1, 100);
  ops::situ(*ctx, y.mat(), gate.mat(), up.mat(), {});
  for (std::int64_t i = 0; i < 100; ++i) {
    float alone = 0;
    ops::situ(*ctx, {&alone, {1, 1}}, {gate.row(0) + i, {1, 1}}, {up.row(0) + i, {1, 1}}, {});
    EXPECT_EQ(alone, y.row(0)[i]) << i;
  }
}

TEST(Act, EveryInstructionSetIsWithinTheBound) {
  const PoisonedContext ctx;
  Rows gate = Rows::normal(kRows, 33, 1, 4.0);
  Rows up = Rows::normal(kRows, 33, 2, 20.0);
  RefTensor gate_ref(gate.values<double>());
  RefTensor up_ref(up.values<double>());
  RefTensor expected = RefTensor::zeros(kRows * 33);
  ref::situ<double>(expected.mat(33), gate_ref.mat(33), up_ref.mat(33), {});
  for_each_simd_target([&](const char* target) {
    Rows y(kRows, 33);
    cpu_act_ops().situ(*ctx, y.mat(), gate.mat(), up.mat(), {});
    EXPECT_TRUE(close(y.values().data(), expected.values(),
                      elementwise_tolerance(max_abs(expected.values()))))
        << target;
  });
}

}  // namespace
}  // namespace tandem::test
