#include "models/kimi_k3/finite.h"

#include <algorithm>
#include <cstring>

namespace tandem::kimi_k3 {
namespace {

/// An element whose exponent is all ones is no number. In blocks, so that the compiler can look at
/// many at a time.
template <typename Bits>
Status check(std::span<const std::byte> bytes, Bits exponent, std::int64_t cols) {
  constexpr std::size_t kBlock = 4096;
  Bits block[kBlock];
  const std::size_t count = bytes.size() / sizeof(Bits);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    std::memcpy(block, bytes.data() + begin * sizeof(Bits), n * sizeof(Bits));
    unsigned bad = 0;
    for (std::size_t i = 0; i < n; ++i) {
      bad |= static_cast<unsigned>((block[i] & exponent) == exponent);
    }
    if (bad != 0) {
      const Bits* const found =
          std::find_if(block, block + n, [&](Bits b) { return (b & exponent) == exponent; });
      const auto at = static_cast<std::int64_t>(begin) + (found - block);
      return fail("weight[{}, {}]: expected a finite number, found NaN or infinity", at / cols,
                  at % cols);
    }
  }
  return Ok{};
}

}  // namespace

Status check_finite(std::span<const std::byte> bytes, DType dtype, std::int64_t cols) {
  switch (dtype) {
    case DType::kF32:
      return check<std::uint32_t>(bytes, 0x7F80'0000U, cols);
    case DType::kBF16:
      return check<std::uint16_t>(bytes, 0x7F80U, cols);
    default:
      return Ok{};
  }
}

}  // namespace tandem::kimi_k3
