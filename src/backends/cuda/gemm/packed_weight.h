// packed_weight.h — from a weight whose format is known at run time to code for that format.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/check.h"
#include "ops/gemm.h"

namespace tandem::cuda {

[[nodiscard]] inline const std::uint8_t* packed_data(const PackedWeight& w) {
  return reinterpret_cast<const std::uint8_t*>(w.data.data());
}

/// fn(std::integral_constant<WeightFormat, format>) for the formats of the tensor cores.
template <typename Fn>
void with_packed_format(WeightFormat format, const Fn& fn) {
  switch (format) {
    case WeightFormat::kBF16:
      return fn(std::integral_constant<WeightFormat, WeightFormat::kBF16>{});
    case WeightFormat::kFp8Block:
      return fn(std::integral_constant<WeightFormat, WeightFormat::kFp8Block>{});
    case WeightFormat::kMxFp4:
      return fn(std::integral_constant<WeightFormat, WeightFormat::kMxFp4>{});
    case WeightFormat::kNvFp4:
      return fn(std::integral_constant<WeightFormat, WeightFormat::kNvFp4>{});
    case WeightFormat::kF32:
      break;
  }
  TDM_CHECK(false, "fp32 weights have no tensor-core path");
}

}  // namespace tandem::cuda
