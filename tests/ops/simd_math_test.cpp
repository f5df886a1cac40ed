// Accuracy of the vector functions against long double, on every instruction set of this machine.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/simd_math_test.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// after foreach_target
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "backends/cpu/simd_loops-inl.h"
#include "backends/cpu/simd_math-inl.h"
#include "core/rng.h"
#include "ops/each_target.h"

#ifndef TDM_SIMD_MATH_TEST_FN
#define TDM_SIMD_MATH_TEST_FN
namespace tandem {
enum class Fn { kExp, kSigmoid, kSigmoidComplement, kSilu, kTanh, kLog1p, kSoftplus };
}  // namespace tandem
#endif

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

HWY_INLINE FloatVec evaluate(Fn fn, FloatVec v) {
  const FloatTag d;
  switch (fn) {
    case Fn::kExp:
      return vexp(d, v);
    case Fn::kSigmoid:
      return vsigmoid(d, v);
    case Fn::kSigmoidComplement:
      return vsigmoid_pair(d, v).complement;
    case Fn::kSilu:
      return vsilu(d, v);
    case Fn::kTanh:
      return vtanh(d, v);
    case Fn::kLog1p:
      return vlog1p(d, v);
    case Fn::kSoftplus:
      return vsoftplus(d, v);
  }
  return v;
}

void apply(Fn fn, float* y, const float* x, std::size_t n) {
  for_each_vector(n, [&](std::size_t i, auto part)
                         HWY_ATTR { part.store(evaluate(fn, part.load(x + i)), y + i); });
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(apply);

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Case {
  Fn fn;
  const char* name;
  long double (*exact)(long double);
  float low;
  float high;
  double max_ulp;
};

const Case kCases[] = {
    {Fn::kExp, "exp", [](long double x) { return std::exp(x); }, -105.0F, 88.7F, 1.5},
    {Fn::kSigmoid, "sigmoid", [](long double x) { return 1 / (1 + std::exp(-x)); }, -104.0F, 104.0F,
     2.0},
    {Fn::kSigmoidComplement, "1 - sigmoid", [](long double x) { return 1 / (1 + std::exp(x)); },
     -104.0F, 104.0F, 2.5},
    {Fn::kSilu, "silu", [](long double x) { return x / (1 + std::exp(-x)); }, -80.0F, 104.0F, 3.0},
    {Fn::kTanh, "tanh", [](long double x) { return std::tanh(x); }, -12.0F, 12.0F, 1.5},
    {Fn::kLog1p, "log1p", [](long double x) { return std::log1p(x); }, -0.999F, 1e6F, 1.5},
    {Fn::kLog1p, "log1p near 0", [](long double x) { return std::log1p(x); }, -0.5F, 1.0F, 1.5},
    {Fn::kSoftplus, "softplus", [](long double x) { return std::log1p(std::exp(x)); }, -80.0F,
     80.0F, 1.5},
};

/// Half uniform over the range, half log-uniform in magnitude around zero.
std::vector<float> inputs(const Case& c) {
  std::vector<float> x{c.low, c.high, 0.0F, -0.0F, 1e-30F, 0.64F, 0.63999F};
  Rng rng(mix_key({7, static_cast<std::uint64_t>(c.fn)}));
  const double low = static_cast<double>(c.low);
  const double high = static_cast<double>(c.high);
  for (int i = 0; i < 30000; ++i) {
    x.push_back(static_cast<float>(low + (high - low) * rng.uniform()));
    const double small = std::exp(-20.0 * rng.uniform());
    x.push_back(static_cast<float>(rng.uniform() < 0.5 ? low * small : high * small));
  }
  return x;
}

double error_in_ulp(float actual, long double exact) {
  const float rounded = static_cast<float>(exact);
  const float magnitude = std::max(std::abs(rounded), std::numeric_limits<float>::min());
  const float ulp = std::nextafter(magnitude, kInf) - magnitude;
  return static_cast<double>(std::abs(static_cast<long double>(actual) - exact) /
                             static_cast<long double>(ulp));
}

TEST(SimdMath, WithinUlpBoundOnEveryTarget) {
  test::for_each_simd_target([](const char* target) {
    for (const Case& c : kCases) {
      const std::vector<float> x = inputs(c);
      std::vector<float> y(x.size());
      HWY_DYNAMIC_DISPATCH(apply)(c.fn, y.data(), x.data(), x.size());
      double worst = 0;
      float at = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double error = error_in_ulp(y[i], c.exact(static_cast<long double>(x[i])));
        if (!(error <= worst)) {
          worst = error;
          at = x[i];
        }
      }
      EXPECT_LE(worst, c.max_ulp) << target << " " << c.name << " at " << at;
      ::testing::Test::RecordProperty(std::string(target) + " " + c.name, std::to_string(worst));
    }
  });
}

TEST(SimdMath, LimitsAndNaN) {
  test::for_each_simd_target([](const char* target) {
    const auto at = [](Fn fn, float x) {
      float y = 0;
      HWY_DYNAMIC_DISPATCH(apply)(fn, &y, &x, 1);
      return y;
    };
    EXPECT_EQ(at(Fn::kExp, -kInf), 0.0F) << target;
    EXPECT_EQ(at(Fn::kExp, kInf), kInf) << target;
    EXPECT_EQ(at(Fn::kExp, 0.0F), 1.0F) << target;
    EXPECT_EQ(at(Fn::kSigmoid, -kInf), 0.0F) << target;
    EXPECT_EQ(at(Fn::kSigmoid, kInf), 1.0F) << target;
    EXPECT_EQ(at(Fn::kSigmoid, 0.0F), 0.5F) << target;
    EXPECT_EQ(at(Fn::kTanh, -kInf), -1.0F) << target;
    EXPECT_EQ(at(Fn::kTanh, kInf), 1.0F) << target;
    EXPECT_EQ(at(Fn::kLog1p, kInf), kInf) << target;
    EXPECT_EQ(at(Fn::kSoftplus, -kInf), 0.0F) << target;
    EXPECT_EQ(at(Fn::kSoftplus, kInf), kInf) << target;
    for (const Case& c : kCases) {
      EXPECT_TRUE(std::isnan(at(c.fn, std::numeric_limits<float>::quiet_NaN())))
          << target << " " << c.name;
    }
  });
}

TEST(SimdMath, AValueDoesNotDependOnItsPosition) {
  test::for_each_simd_target([](const char* target) {
    for (const Case& c : kCases) {
      for (std::size_t n = 1; n <= 40; ++n) {
        const std::vector<float> x(n, 0.37F);
        std::vector<float> y(n);
        HWY_DYNAMIC_DISPATCH(apply)(c.fn, y.data(), x.data(), n);
        for (std::size_t i = 0; i < n; ++i) {
          ASSERT_EQ(y[i], y[0]) << target << " " << c.name << " " << n << " " << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace tandem
#endif
