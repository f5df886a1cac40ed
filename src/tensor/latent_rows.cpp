#include "tensor/latent_rows.h"

#include <algorithm>
#include <array>

#include "tensor/dtype.h"
#include "tensor/quant.h"

namespace tandem {
namespace {

constexpr std::array<float, 256> kE4M3Values = [] {
  std::array<float, 256> values{};
  for (std::size_t code = 0; code < values.size(); ++code) {
    values[code] = decode_e4m3(static_cast<std::uint8_t>(code));
  }
  return values;
}();

}  // namespace

std::string_view latent_format_name(LatentFormat format) {
  constexpr std::array<std::string_view, 3> kNames{"fp32", "bf16", "fp8"};
  return kNames[static_cast<std::size_t>(format)];
}

void encode_latent(std::byte* row, LatentFormat format, std::span<const float> values) {
  switch (format) {
    case LatentFormat::kF32:
      std::ranges::copy(std::as_bytes(values), row);
      return;
    case LatentFormat::kBF16:
      std::ranges::transform(values, reinterpret_cast<BF16*>(row), BF16::from_float);
      return;
    case LatentFormat::kFp8:
      std::ranges::transform(values, reinterpret_cast<std::uint8_t*>(row), [](float value) {
        return encode_e4m3(BF16::from_float(value).to_float());
      });
      return;
  }
}

void decode_latent(std::span<float> values, const std::byte* row, LatentFormat format) {
  switch (format) {
    case LatentFormat::kF32:
      std::copy_n(row, values.size_bytes(), std::as_writable_bytes(values).begin());
      return;
    case LatentFormat::kBF16: {
      const auto* from = reinterpret_cast<const BF16*>(row);
      std::transform(from, from + values.size(), values.begin(),
                     [](BF16 value) { return value.to_float(); });
      return;
    }
    case LatentFormat::kFp8: {
      const auto* from = reinterpret_cast<const std::uint8_t*>(row);
      std::transform(from, from + values.size(), values.begin(),
                     [](std::uint8_t code) { return kE4M3Values[code]; });
      return;
    }
  }
}

}  // namespace tandem
