// op_test.h — what op tests share: an execution context, random tensors between guard bands, and
// comparison with a derived tolerance.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "ops/exec_ctx.h"
#include "support/backend_under_test.h"
#include "tensor/view.h"

namespace tandem::test {

/// Owns what an ExecCtx points to.
class TestContext {
 public:
  explicit TestContext(int num_threads = 2)
      : pool_(num_threads),
        arena_(arena_under_test()),
        ctx_{&ops_under_test(), &pool_, &arena_, nullptr, &device_under_test()} {}
  [[nodiscard]] const ExecCtx& operator*() const { return ctx_; }

 private:
  ThreadPool pool_;
  Arena arena_;
  ExecCtx ctx_;
};

/// A contiguous fp32 tensor with 64 poisoned floats before and after it.
class Tensor {
 public:
  static constexpr std::int64_t kGuard = 64;
  static constexpr float kPoison = 7.25e33F;

  /// Filled with NaN: an output that is not written shows.
  explicit Tensor(std::int64_t numel) : data_(usize(numel + 2 * kGuard), kPoison) {
    std::fill(begin(), end(), std::numeric_limits<float>::quiet_NaN());
  }
  static Tensor filled(std::int64_t numel, float value) {
    Tensor t(numel);
    std::fill(t.begin(), t.end(), value);
    return t;
  }
  static Tensor normal(std::int64_t numel, std::uint64_t seed, double scale = 1.0) {
    Tensor t(numel);
    Rng rng(mix_key({seed, 0x7E57}));
    std::generate(t.begin(), t.end(), [&] { return static_cast<float>(scale * rng.normal()); });
    return t;
  }

  [[nodiscard]] float* data() { return data_.data() + kGuard; }
  [[nodiscard]] const float* data() const { return data_.data() + kGuard; }
  [[nodiscard]] float* begin() { return data(); }
  [[nodiscard]] float* end() { return data() + numel(); }
  [[nodiscard]] const float* begin() const { return data(); }
  [[nodiscard]] const float* end() const { return data() + numel(); }
  [[nodiscard]] std::int64_t numel() const { return isize(data_) - 2 * kGuard; }
  [[nodiscard]] float operator[](std::int64_t i) const { return data()[i]; }
  [[nodiscard]] float& operator[](std::int64_t i) { return data()[i]; }

  [[nodiscard]] F32Vec vec() { return {data(), {numel()}}; }
  [[nodiscard]] F32Mat mat(std::int64_t rows, std::int64_t cols) {
    TDM_CHECK(rows * cols == numel(), rows, cols, numel());
    return {data(), {rows, cols}};
  }
  [[nodiscard]] F32Cube cube(std::int64_t a, std::int64_t b, std::int64_t c) {
    TDM_CHECK(a * b * c == numel(), a, b, c, numel());
    return {data(), {a, b, c}};
  }
  /// The same values in double, for the oracle.
  [[nodiscard]] std::vector<double> as_double() const { return {begin(), end()}; }
  /// True when nothing wrote outside the tensor.
  [[nodiscard]] bool guards_intact() const {
    const auto intact = [](float value) { return value == kPoison; };
    return std::all_of(data_.begin(), data_.begin() + kGuard, intact) &&
           std::all_of(data_.end() - kGuard, data_.end(), intact);
  }

 private:
  std::vector<float> data_;
};

/// Bound on |fp32 result - exact| for a sum of `terms` products whose absolute values sum to at
/// most `magnitude`: each of the `terms` roundings contributes at most eps/2 of the running
/// magnitude (Higham, gamma_n), plus a few ulp for the element-wise functions around it.
[[nodiscard]] inline double sum_tolerance(std::int64_t terms, double magnitude) {
  constexpr double kEps = 1.1920928955078125e-07;
  return kEps * (0.5 * static_cast<double>(terms) + 4.0) * magnitude;
}

/// Compares with the oracle: NaN positions must match, then |a - e| <= tolerance. Reports the worst
/// element.
template <typename Expected>
[[nodiscard]] ::testing::AssertionResult close(const float* actual, const Expected& expected,
                                               double tolerance) {
  double worst = -1;
  std::size_t worst_at = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double a = static_cast<double>(actual[i]);
    const double e = static_cast<double>(expected[i]);
    if (std::isnan(a) != std::isnan(e)) {
      return ::testing::AssertionFailure()
             << "NaN mismatch at " << i << ": actual " << a << " expected " << e;
    }
    const double error = std::isnan(a) ? 0 : std::abs(a - e);
    if (error > worst) {
      worst = error;
      worst_at = i;
    }
  }
  if (worst > tolerance) {
    return ::testing::AssertionFailure()
           << "worst error " << worst << " > " << tolerance << " at " << worst_at << ": actual "
           << actual[worst_at] << " expected " << expected[worst_at];
  }
  return ::testing::AssertionSuccess();
}

/// The largest absolute value, for tolerances that scale with the data.
template <typename Values>
[[nodiscard]] double max_abs(const Values& values) {
  double largest = 0;
  for (const auto value : values) {
    largest = std::max(largest, std::abs(static_cast<double>(value)));
  }
  return largest;
}

[[nodiscard]] inline bool same_bits(const float* a, const float* b, std::int64_t count) {
  // An empty tensor may be null, which memcmp does not take.
  return count == 0 || std::memcmp(a, b, usize(count) * sizeof(float)) == 0;
}

}  // namespace tandem::test
