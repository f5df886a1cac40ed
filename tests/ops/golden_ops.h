// golden_ops.h — one operator of ops.safetensors: NAME.INPUT, NAME.OUTPUT and *_grad of each.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "support/golden.h"
#include "support/op_test.h"

namespace tandem::test {

class GoldenOp {
 public:
  explicit GoldenOp(std::string name) : name_(std::move(name)) {}

  [[nodiscard]] Tensor tensor(const std::string& part) const {
    const std::vector<float> values = expected(part);
    Tensor t(isize(values));
    std::copy(values.begin(), values.end(), t.begin());
    return t;
  }
  [[nodiscard]] std::vector<float> expected(const std::string& part) const {
    return file_.floats(name_ + "." + part);
  }
  [[nodiscard]] std::vector<std::int32_t> ids() const { return file_.ints(name_ + ".ids"); }
  [[nodiscard]] std::int64_t extent(const std::string& part, std::size_t axis) const {
    return file_.shape(name_ + "." + part).at(axis);
  }

  /// Prints and checks the worst error. Bound: 8 times that of the reference's own fp32 run
  /// (ops.json, fp32_noise), as the order of summation is another one here; and, where that run was
  /// lucky, 8 ulp of the largest value, which functions of 3 ulp and the roundings around them
  /// need.
  template <typename Actual>
  void check(const std::string& part, const Actual& actual) const {
    const std::vector<float> values = expected(part);
    const double noise = json_["fp32_noise"].at(name_ + "." + part);
    const double bound = std::max(8 * noise, 8 * 0x1p-23 * max_abs(values));
    ASSERT_EQ(std::size(actual), values.size()) << name_ << "." << part;
    Worst worst;
    for (std::size_t i = 0; i < values.size(); ++i) {
      worst.add(std::abs(static_cast<double>(actual[i]) - double{values[i]}), std::to_string(i));
    }
    expect_within(name_ + "." + part, worst, bound);
  }
  void check(const std::string& part, const Tensor& actual) const {
    check(part, std::span(actual.begin(), usize(actual.numel())));
    EXPECT_TRUE(actual.guards_intact()) << name_ << "." << part;
  }

 private:
  GoldenFile file_{"ops.safetensors"};
  nlohmann::json json_ = golden_json("ops.json");
  std::string name_;
};

}  // namespace tandem::test
