// golden.h — reads the fixtures of tests/golden/k3-tiny, which an independent fp64 program wrote
// (tools/golden), and the measures they are stored in. Link tdm_io and nlohmann_json.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/checked_cast.h"
#include "io/safetensors.h"

namespace tandem::test {

inline std::string golden_path(std::string_view file) {
  return fmt::format("{}/tests/golden/k3-tiny/{}", TDM_SOURCE_DIR, file);
}

inline nlohmann::json golden_json(std::string_view file) {
  std::ifstream in(golden_path(file));
  TDM_CHECK(in.good(), std::string(file));
  return nlohmann::json::parse(in);
}

/// One fixture file; a missing tensor ends the test program with its name.
class GoldenFile {
 public:
  explicit GoldenFile(std::string_view file)
      : file_(SafetensorsFile::open(golden_path(file)).value_or_throw()) {}

  [[nodiscard]] const TensorInfo& info(const std::string& name) const {
    const TensorInfo* found = file_.find(name);
    TDM_CHECK(found != nullptr, name);
    return *found;
  }
  [[nodiscard]] const std::vector<std::int64_t>& shape(const std::string& name) const {
    return info(name).shape;
  }
  [[nodiscard]] std::vector<float> floats(const std::string& name) const {
    TDM_CHECK(info(name).dtype == DType::kF32, name);
    return info(name).copy<float>();
  }
  [[nodiscard]] std::vector<std::int32_t> ints(const std::string& name) const {
    TDM_CHECK(info(name).dtype == DType::kI32, name);
    return info(name).copy<std::int32_t>();
  }
  [[nodiscard]] std::vector<std::uint8_t> bytes(const std::string& name) const {
    TDM_CHECK(info(name).dtype == DType::kU8, name);
    return info(name).copy<std::uint8_t>();
  }

 private:
  SafetensorsFile file_;
};

/// The mix behind every input of the fixtures (manifest.json, rules.hash32).
[[nodiscard]] inline std::uint32_t hash32(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352DU;
  x ^= x >> 15;
  x *= 0x846CA68BU;
  return x ^ (x >> 16);
}

/// rules.fingerprint: l2 norm, sum, and dot with a fixed sequence of signs.
struct Fingerprint {
  double l2 = 0;
  double sum = 0;
  double dot = 0;
};
[[nodiscard]] inline Fingerprint fingerprint(std::span<const float> values) {
  Fingerprint f;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto x = static_cast<double>(values[i]);
    f.l2 += x * x;
    f.sum += x;
    f.dot += (hash32(static_cast<std::uint32_t>(i)) & 1U) == 0 ? x : -x;
  }
  f.l2 = std::sqrt(f.l2);
  return f;
}

/// rules.elements: where the eight stored elements of a tensor lie.
[[nodiscard]] inline std::array<std::size_t, 8> element_indices(std::int64_t numel) {
  std::array<std::size_t, 8> indices{};
  for (std::uint32_t j = 0; j < indices.size(); ++j) {
    indices[j] = hash32(j + 1) % usize(numel);
  }
  return indices;
}

/// max |actual - expected| / max |expected|; infinity when a value is not finite or sizes differ.
template <typename Actual, typename Expected>
[[nodiscard]] double worst_relative(const Actual& actual, const Expected& expected) {
  if (std::size(actual) != std::size(expected)) {
    return std::numeric_limits<double>::infinity();
  }
  double worst = 0;
  double largest = 0;
  for (std::size_t i = 0; i < std::size(expected); ++i) {
    const double error =
        std::abs(static_cast<double>(actual[i]) - static_cast<double>(expected[i]));
    if (!std::isfinite(error)) {
      return std::numeric_limits<double>::infinity();
    }
    worst = std::max(worst, error);
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
  }
  return worst == 0 ? 0 : worst / largest;
}

/// The worst of several measurements, and where it was.
struct Worst {
  double value = 0;
  std::string where = "none";

  void add(double measured, std::string_view at) {
    if (!(measured <= value)) {
      value = measured;
      where = at;
    }
  }
};

/// Prints the measured error, so that a log shows how far below the bound it is, and checks it.
inline void expect_within(std::string_view what, const Worst& worst, double bound) {
  fmt::print("[ measured ] {}: worst {:.3g} ({}), bound {:.3g}\n", what, worst.value, worst.where,
             bound);
  EXPECT_LE(worst.value, bound) << what << ": " << worst.where;
}
inline void expect_within(std::string_view what, double measured, double bound) {
  expect_within(what, Worst{measured, "all"}, bound);
}

}  // namespace tandem::test
