// dtype.h — element types of tensors in files and in memory, and the bf16 storage type.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tandem {

enum class DType {
  kF32,
  kBF16,
  kF16,
  kF8E4M3,
  kU8,
  kI8,
  kI16,
  kU16,
  kI32,
  kU32,
  kI64,
  kU64,
  kF64,
  kBool
};

/// Bytes of one element.
[[nodiscard]] std::int64_t dtype_size(DType dtype);
/// The safetensors spelling: "F32", "BF16", "F8_E4M3", "U8", ...
[[nodiscard]] std::string_view dtype_name(DType dtype);
[[nodiscard]] std::optional<DType> dtype_from_name(std::string_view name);

/// bfloat16 storage: the upper half of an fp32. Arithmetic happens in fp32.
struct BF16 {
  std::uint16_t bits = 0;

  [[nodiscard]] constexpr float to_float() const {
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
  }
  /// Round to nearest even; NaN stays NaN.
  [[nodiscard]] static constexpr BF16 from_float(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    if ((u & 0x7FFFFFFFU) > 0x7F800000U) {
      return {static_cast<std::uint16_t>((u >> 16) | 0x40U)};
    }
    return {static_cast<std::uint16_t>((u + 0x7FFFU + ((u >> 16) & 1U)) >> 16)};
  }
};

}  // namespace tandem
