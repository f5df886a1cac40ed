// latent_rows.h — cached latent rows and their element formats. A row is [ c | k_s ], `width`
// elements next to each other.
//
// A row is rounded once, when it is stored: fp32 as it is; bf16 to nearest even; fp8 to bf16 first
// and from there to E4M3 (two roundings, as in the release's serving kernels), saturating at 448.
// NaN stays NaN. Scales are 1: no checkpoint ships any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "core/check.h"
#include "tensor/view.h"

namespace tandem {

enum class LatentFormat { kF32, kBF16, kFp8 };

[[nodiscard]] constexpr std::int64_t element_bytes(LatentFormat format) {
  switch (format) {
    case LatentFormat::kF32:
      return 4;
    case LatentFormat::kBF16:
      return 2;
    case LatentFormat::kFp8:
      break;
  }
  return 1;
}
/// "fp32", "bf16", "fp8".
[[nodiscard]] std::string_view latent_format_name(LatentFormat format);

/// [rows, width] elements of one format. Byte is std::byte or const std::byte.
template <typename Byte>
struct LatentRowsView {
  Byte* data = nullptr;
  LatentFormat format = LatentFormat::kF32;
  std::int64_t num_rows = 0;
  std::int64_t width = 0;      // elements
  std::int64_t row_bytes = 0;  // from one row to the next

  LatentRowsView() = default;
  /// Rows without gaps.
  LatentRowsView(Byte* at, LatentFormat of, std::int64_t rows, std::int64_t elements)
      : data(at),
        format(of),
        num_rows(rows),
        width(elements),
        row_bytes(elements * element_bytes(of)) {}
  /// The rows of an fp32 matrix.
  template <typename T>
  requires(std::is_same_v<std::remove_const_t<T>, float> &&
           (std::is_const_v<Byte> ||
            !std::is_const_v<T>)) explicit LatentRowsView(const TensorView<T, 2>& mat)
      : data(reinterpret_cast<Byte*>(mat.data())),
        num_rows(mat.size(0)),
        width(mat.size(1)),
        row_bytes(mat.stride(0) * 4) {}

  /// A view of mutable rows reads as a view of const ones.
  operator LatentRowsView<const Byte>() const  // NOLINT(google-explicit-constructor)
      requires(!std::is_const_v<Byte>) {
    LatentRowsView<const Byte> view;
    view.data = data;
    view.format = format;
    view.num_rows = num_rows;
    view.width = width;
    view.row_bytes = row_bytes;
    return view;
  }

  [[nodiscard]] bool empty() const { return num_rows * width == 0; }
  [[nodiscard]] Byte* row(std::int64_t i) const { return data + i * row_bytes; }
  /// The rows as a matrix; they must be fp32.
  [[nodiscard]] auto f32() const {
    using Float = std::conditional_t<std::is_const_v<Byte>, const float, float>;
    TDM_CHECK(format == LatentFormat::kF32 && row_bytes % 4 == 0, row_bytes);
    return TensorView<Float, 2>(reinterpret_cast<Float*>(data), {num_rows, width},
                                {row_bytes / 4, 1});
  }
};

using LatentRows = LatentRowsView<std::byte>;
using ConstLatentRows = LatentRowsView<const std::byte>;

/// Rounds `values` into a row.
void encode_latent(std::byte* row, LatentFormat format, std::span<const float> values);
/// The exact values of a row's elements.
void decode_latent(std::span<float> values, const std::byte* row, LatentFormat format);

}  // namespace tandem
