// op_checks.h — checks that every op family repeats: strided rows between poison, results that do
// not depend on the thread count, central differences.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "support/op_test.h"

namespace tandem::test {

/// Row widths around the vector sizes (4, 8, 16 lanes; 4 x 16 unrolled) and two model sizes.
inline constexpr std::int64_t kWidths[] = {1, 7, 15, 16, 17, 33, 128, 320};

/// `rows` rows of `cols` floats with `pad` poisoned floats after each row: a strided view. Filled
/// with NaN.
class Rows {
 public:
  Rows(std::int64_t rows, std::int64_t cols, std::int64_t pad = 0)
      : rows_(rows), cols_(cols), pad_(pad), data_(rows * (cols + pad)) {
    for (std::int64_t r = 0; r < rows; ++r) {
      std::fill_n(row(r) + cols, pad, Tensor::kPoison);
    }
  }
  static Rows normal(std::int64_t rows, std::int64_t cols, std::uint64_t seed, double scale = 1.0,
                     std::int64_t pad = 0) {
    Rows t(rows, cols, pad);
    Rng rng(mix_key({seed, 0x0A0B}));
    for (std::int64_t r = 0; r < rows; ++r) {
      std::generate_n(t.row(r), cols, [&] { return static_cast<float>(scale * rng.normal()); });
    }
    return t;
  }
  static Rows filled(std::int64_t rows, std::int64_t cols, float value, std::int64_t pad = 0) {
    Rows t(rows, cols, pad);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::fill_n(t.row(r), cols, value);
    }
    return t;
  }
  /// The same values with another padding.
  [[nodiscard]] Rows repadded(std::int64_t pad) const {
    Rows t(rows_, cols_, pad);
    for (std::int64_t r = 0; r < rows_; ++r) {
      std::copy_n(row(r), cols_, t.row(r));
    }
    return t;
  }

  [[nodiscard]] float* row(std::int64_t r) { return data_.data() + r * (cols_ + pad_); }
  [[nodiscard]] const float* row(std::int64_t r) const { return data_.data() + r * (cols_ + pad_); }
  [[nodiscard]] F32Mat mat() { return {data_.data(), {rows_, cols_}, {cols_ + pad_, 1}}; }
  [[nodiscard]] F32Cube cube(std::int64_t heads) {
    return {data_.data(), {rows_ / heads, heads, cols_}, {heads * (cols_ + pad_), cols_ + pad_, 1}};
  }
  /// Row-major without the padding.
  template <typename T = float>
  [[nodiscard]] std::vector<T> values() const {
    std::vector<T> out;
    out.reserve(usize(rows_ * cols_));
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < cols_; ++c) {
        out.push_back(static_cast<T>(row(r)[c]));
      }
    }
    return out;
  }
  [[nodiscard]] bool poison_intact() const {
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = cols_; c < cols_ + pad_; ++c) {
        if (row(r)[c] != Tensor::kPoison) {
          return false;
        }
      }
    }
    return data_.guards_intact();
  }

 private:
  std::int64_t rows_;
  std::int64_t cols_;
  std::int64_t pad_;
  Tensor data_;
};

/// A tensor of doubles for the oracle.
class RefTensor {
 public:
  explicit RefTensor(std::vector<double> values) : values_(std::move(values)) {}
  static RefTensor zeros(std::int64_t numel) {
    return RefTensor(std::vector<double>(usize(numel), 0.0));
  }
  static RefTensor normal(std::int64_t numel, std::uint64_t seed, double scale = 1.0) {
    RefTensor t = zeros(numel);
    Rng rng(mix_key({seed, 0x0C0D}));
    std::generate(t.values_.begin(), t.values_.end(), [&] { return scale * rng.normal(); });
    return t;
  }
  [[nodiscard]] RefTensor abs() const {
    RefTensor t = *this;
    std::for_each(t.values_.begin(), t.values_.end(), [](double& v) { v = std::abs(v); });
    return t;
  }

  [[nodiscard]] const std::vector<double>& values() const { return values_; }
  [[nodiscard]] std::vector<double>& values() { return values_; }
  [[nodiscard]] TensorView<double, 1> vec() { return {values_.data(), {isize(values_)}}; }
  [[nodiscard]] TensorView<double, 2> mat(std::int64_t cols) {
    return {values_.data(), {isize(values_) / std::max<std::int64_t>(cols, 1), cols}};
  }
  [[nodiscard]] TensorView<double, 3> cube(std::int64_t heads, std::int64_t cols) {
    return {values_.data(), {isize(values_) / (heads * cols), heads, cols}};
  }

 private:
  std::vector<double> values_;
};

[[nodiscard]] inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

/// A TestContext whose workspace holds NaN: scratch that is read before it is written shows.
class PoisonedContext : public TestContext {
 public:
  explicit PoisonedContext(int num_threads = 2) : TestContext(num_threads) {
    Arena& arena = *(**this).workspace;
    const std::span<float> all = arena.take<float>(std::int64_t{1} << 20);  // one block
    std::fill(all.begin(), all.end(), std::numeric_limits<float>::quiet_NaN());
    arena.reset();
  }
};

/// `compute(ctx)` returns every output as one vector of floats; it must give the same bits with 1,
/// 2 and 3 threads.
template <typename Compute>
void expect_same_for_any_thread_count(const Compute& compute) {
  const PoisonedContext one(1);
  const std::vector<float> expected = compute(*one);
  for (const int threads : {2, 3}) {
    const PoisonedContext many(threads);
    const std::vector<float> actual = compute(*many);
    ASSERT_EQ(actual.size(), expected.size());
    EXPECT_TRUE(same_bits(actual.data(), expected.data(), isize(actual))) << threads << " threads";
  }
}

/// Compares `gradient` with central differences of loss() in every element of `x`. The step h =
/// 1e-5 leaves a truncation error of about h^2 |f'''| / 6 < 1e-9 and a rounding error of about
/// 1e-16 |loss| / h < 1e-10 |loss| for the O(1) functions tested.
template <typename Loss>
void expect_central_differences(const Loss& loss, RefTensor& x, const RefTensor& gradient,
                                const char* name) {
  constexpr double kStep = 1e-5;
  ASSERT_EQ(x.values().size(), gradient.values().size()) << name;
  for (std::size_t i = 0; i < x.values().size(); ++i) {
    const double saved = x.values()[i];
    x.values()[i] = saved + kStep;
    const double above = loss();
    x.values()[i] = saved - kStep;
    const double below = loss();
    x.values()[i] = saved;
    const double numeric = (above - below) / (2 * kStep);
    const double tolerance = 1e-8 * (1 + std::abs(numeric)) + 1e-10 * std::abs(above);
    EXPECT_NEAR(gradient.values()[i], numeric, tolerance) << name << "[" << i << "]";
  }
}

/// Appends, so that several outputs can be compared as one.
inline void append(std::vector<float>& all, const std::vector<float>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

}  // namespace tandem::test
