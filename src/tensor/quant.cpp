#include "tensor/quant.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "core/checked_cast.h"

namespace tandem {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0);
}

/// Scales are kept at or above the smallest normal fp32: dividing by less would overflow.
constexpr float kMinScale = std::numeric_limits<float>::min();

std::string shape_text(const ConstU8Mat& m) {
  return fmt::format("[{}, {}]", m.size(0), m.size(1));
}

Status check_fp4_shapes(const ConstU8Mat& packed, const ConstU8Mat& scale, std::int64_t group) {
  const std::int64_t cols = packed.size(1) * 2;
  if (cols % group != 0) {
    return fail("packed {}: expected a number of columns ({}) that is a multiple of the group {}",
                shape_text(packed), cols, group);
  }
  if (scale.size(0) != packed.size(0) || scale.size(1) != cols / group) {
    return fail("scale: expected shape [{}, {}] for packed {}, found {}", packed.size(0),
                cols / group, shape_text(packed), shape_text(scale));
  }
  return Ok{};
}

Status check_fp8_shapes(const Fp8BlockView& m) {
  const std::array<std::int64_t, 2> shape{m.scale.size(0), m.scale.size(1)};
  return check_fp8_scale_shape(shape, m.rows(), m.cols());
}

/// Decodes one group of packed codes times `scale`.
void decode_codes(std::span<float> out, const std::uint8_t* packed, float scale) {
  for (std::size_t pair = 0; pair < out.size() / 2; ++pair) {
    const std::uint8_t byte = packed[pair];
    out[2 * pair] = decode_e2m1(byte & 0xFU) * scale;
    out[2 * pair + 1] = decode_e2m1(static_cast<std::uint8_t>(byte >> 4)) * scale;
  }
}

void encode_codes(std::uint8_t* packed, std::span<const float> in, float scale) {
  for (std::size_t pair = 0; pair < in.size() / 2; ++pair) {
    const unsigned low = encode_e2m1(in[2 * pair] / scale);
    const unsigned high = encode_e2m1(in[2 * pair + 1] / scale);
    packed[pair] = static_cast<std::uint8_t>(low | high << 4);
  }
}

/// Largest magnitude of finite values; infinity or NaN when there is one that is not finite.
float amax_of(std::span<const float> values) {
  float amax = 0.0F;
  for (const float value : values) {
    const float magnitude = std::abs(value);
    if (!(magnitude <= std::numeric_limits<float>::max())) {
      return magnitude;
    }
    amax = std::max(amax, magnitude);
  }
  return amax;
}

std::span<const float> row_of(const ConstF32Mat& in, std::int64_t row) {
  return {in.row(row), usize(in.size(1))};
}

Status check_input(const ConstF32Mat& in, std::int64_t group) {
  TDM_CHECK(in.size(1) <= 1 || in.stride(1) == 1, in.stride(1));
  if (in.size(1) % group != 0) {
    return fail(
        "quantise [{}, {}]: expected a number of columns that is a multiple of the group {}",
        in.size(0), in.size(1), group);
  }
  for (std::int64_t row = 0; row < in.size(0); ++row) {
    if (!std::isfinite(amax_of(row_of(in, row)))) {
      return fail("quantise [{}, {}]: row {} holds a value that is not finite", in.size(0),
                  in.size(1), row);
    }
  }
  return Ok{};
}

template <typename View>
Expected<std::vector<float>> dequantise_all(const View& matrix) {
  if (Status status = validate(matrix); !status) {
    return status.failure();
  }
  const std::int64_t cols = matrix.cols();
  std::vector<float> out(usize(matrix.rows() * cols));
  for (std::int64_t row = 0; row < matrix.rows(); ++row) {
    const auto out_row = std::span(out).subspan(usize(row * cols), usize(cols));
    if (Status status = dequantise_row(matrix, row, out_row); !status) {
      return status.failure();
    }
  }
  return out;
}

}  // namespace

MxFp4View MxFp4Matrix::view() const {
  return {.packed = {packed.data(), {rows, cols / 2}},
          .scale = {scale.data(), {rows, cols / kMxFp4Group}}};
}

NvFp4View NvFp4Matrix::view() const {
  return {.packed = {packed.data(), {rows, cols / 2}},
          .scale = {scale.data(), {rows, cols / kNvFp4Group}},
          .scale_2 = scale_2};
}

Fp8BlockView Fp8BlockMatrix::view() const {
  return {.codes = {codes.data(), {rows, cols}},
          .scale = {scale.data(), {ceil_div(rows, kFp8Block), ceil_div(cols, kFp8Block)}}};
}

Status validate(const MxFp4View& matrix) {
  if (Status status = check_fp4_shapes(matrix.packed, matrix.scale, kMxFp4Group); !status) {
    return status;
  }
  for (std::int64_t row = 0; row < matrix.rows(); ++row) {
    for (std::int64_t group = 0; group < matrix.scale.size(1); ++group) {
      if (matrix.scale(row, group) == kE8M0NaN) {
        return fail("MXFP4 scale[{}, {}]: expected a power of two, found NaN (byte 0xFF)", row,
                    group);
      }
    }
  }
  return Ok{};
}

Status validate(const NvFp4View& matrix) {
  if (Status status = check_fp4_shapes(matrix.packed, matrix.scale, kNvFp4Group); !status) {
    return status;
  }
  if (!std::isfinite(matrix.scale_2)) {
    return fail("NVFP4 scale_2: expected a finite number, found {}", matrix.scale_2);
  }
  for (std::int64_t row = 0; row < matrix.rows(); ++row) {
    for (std::int64_t group = 0; group < matrix.scale.size(1); ++group) {
      const std::uint8_t byte = matrix.scale(row, group);
      if (std::isnan(decode_e4m3(byte))) {
        return fail("NVFP4 scale[{}, {}]: expected a number, found NaN (byte {:#04x})", row, group,
                    byte);
      }
    }
  }
  return Ok{};
}

Status validate(const Fp8BlockView& matrix) {
  if (Status status = check_fp8_shapes(matrix); !status) {
    return status;
  }
  for (std::int64_t i = 0; i < matrix.scale.size(0); ++i) {
    for (std::int64_t j = 0; j < matrix.scale.size(1); ++j) {
      if (!std::isfinite(matrix.scale(i, j))) {
        return fail("FP8 scale[{}, {}]: expected a finite number, found {}", i, j,
                    matrix.scale(i, j));
      }
    }
  }
  for (std::int64_t row = 0; row < matrix.rows(); ++row) {
    for (std::int64_t col = 0; col < matrix.cols(); ++col) {
      if ((matrix.codes(row, col) & 0x7FU) == 0x7FU) {
        return fail("FP8 weight[{}, {}]: expected a number, found NaN", row, col);
      }
    }
  }
  return Ok{};
}

Status check_fp8_scale_shape(std::span<const std::int64_t> shape, std::int64_t rows,
                             std::int64_t cols) {
  const std::array<std::int64_t, 2> flat{ceil_div(rows, kFp8Block), ceil_div(cols, kFp8Block)};
  const std::array<std::int64_t, 4> spread{flat[0], 1, flat[1], 1};
  if (std::ranges::equal(shape, flat) || std::ranges::equal(shape, spread)) {
    return Ok{};
  }
  return fail(
      "FP8 scale: expected shape [{}, 1, {}, 1] or [{}, {}] for weight [{}, {}], found [{}]",
      flat[0], flat[1], flat[0], flat[1], rows, cols, fmt::join(shape, ", "));
}

Status dequantise_row(const MxFp4View& matrix, std::int64_t row, std::span<float> out) {
  TDM_CHECK(row >= 0 && row < matrix.rows() && isize(out) == matrix.cols(), row, out.size());
  TDM_CHECK(matrix.scale.size(1) * kMxFp4Group == matrix.cols(), matrix.scale.size(1));
  for (std::int64_t group = 0; group < matrix.scale.size(1); ++group) {
    const std::uint8_t byte = matrix.scale(row, group);
    const std::optional<float> scale = decode_e8m0(byte);
    if (!scale) {
      return fail("MXFP4 scale[{}, {}]: expected a power of two, found NaN (byte 0xFF)", row,
                  group);
    }
    const std::int64_t begin = group * kMxFp4Group;
    const auto values = out.subspan(usize(begin), usize(kMxFp4Group));
    decode_codes(values, matrix.packed.row(row) + begin / 2, *scale);
    // 6 * 2^126 is the first product past fp32; the scale bytes of real weights are near 120.
    if (byte >= 253 && !std::isfinite(amax_of(values))) {
      return fail("MXFP4 group [{}, {}]: scale byte {} takes a weight out of the range of fp32",
                  row, group, byte);
    }
  }
  return Ok{};
}

Status dequantise_row(const NvFp4View& matrix, std::int64_t row, std::span<float> out) {
  TDM_CHECK(row >= 0 && row < matrix.rows() && isize(out) == matrix.cols(), row, out.size());
  TDM_CHECK(matrix.scale.size(1) * kNvFp4Group == matrix.cols(), matrix.scale.size(1));
  for (std::int64_t group = 0; group < matrix.scale.size(1); ++group) {
    const std::int64_t begin = group * kNvFp4Group;
    const auto values = out.subspan(usize(begin), usize(kNvFp4Group));
    decode_codes(values, matrix.packed.row(row) + begin / 2,
                 decode_e4m3(matrix.scale(row, group)) * matrix.scale_2);
    if (!std::isfinite(amax_of(values))) {
      return fail(
          "NVFP4 group [{}, {}]: scale byte {:#04x} with scale_2 {} gives a weight that is "
          "not finite",
          row, group, matrix.scale(row, group), matrix.scale_2);
    }
  }
  return Ok{};
}

Status dequantise_row(const Fp8BlockView& matrix, std::int64_t row, std::span<float> out) {
  TDM_CHECK(row >= 0 && row < matrix.rows() && isize(out) == matrix.cols(), row, out.size());
  TDM_CHECK(matrix.scale.size(1) == ceil_div(matrix.cols(), kFp8Block), matrix.scale.size(1));
  for (std::int64_t col = 0; col < matrix.cols(); ++col) {
    const float value =
        decode_e4m3(matrix.codes(row, col)) * matrix.scale(row / kFp8Block, col / kFp8Block);
    if (!std::isfinite(value)) {
      return fail("FP8 weight[{}, {}]: byte {:#04x} with scale {} is not finite", row, col,
                  matrix.codes(row, col), matrix.scale(row / kFp8Block, col / kFp8Block));
    }
    out[usize(col)] = value;
  }
  return Ok{};
}

Expected<std::vector<float>> dequantise(const MxFp4View& matrix) {
  return dequantise_all(matrix);
}
Expected<std::vector<float>> dequantise(const NvFp4View& matrix) {
  return dequantise_all(matrix);
}
Expected<std::vector<float>> dequantise(const Fp8BlockView& matrix) {
  return dequantise_all(matrix);
}

Expected<MxFp4Matrix> quantise_mxfp4(ConstF32Mat in) {
  if (Status status = check_input(in, kMxFp4Group); !status) {
    return status.failure();
  }
  MxFp4Matrix out{.rows = in.size(0), .cols = in.size(1), .packed = {}, .scale = {}};
  out.packed.resize(usize(in.numel() / 2));
  out.scale.resize(usize(in.numel() / kMxFp4Group));
  for (std::size_t group = 0; group < out.scale.size(); ++group) {
    const auto begin = checked_cast<std::int64_t>(group) * kMxFp4Group;
    const auto values =
        row_of(in, begin / out.cols).subspan(usize(begin % out.cols), usize(kMxFp4Group));
    const float amax = amax_of(values);
    const int exponent = amax > 0.0F ? std::ilogb(amax) - 2 + 127 : 0;
    out.scale[group] = static_cast<std::uint8_t>(std::clamp(exponent, 0, 254));
    encode_codes(&out.packed[usize(begin / 2)], values, *decode_e8m0(out.scale[group]));
  }
  return out;
}

Expected<NvFp4Matrix> quantise_nvfp4(ConstF32Mat in, std::optional<float> shared_amax) {
  if (Status status = check_input(in, kNvFp4Group); !status) {
    return status.failure();
  }
  float amax = 0.0F;
  for (std::int64_t row = 0; row < in.size(0); ++row) {
    amax = std::max(amax, amax_of(row_of(in, row)));
  }
  if (shared_amax && !(*shared_amax >= amax && std::isfinite(*shared_amax))) {
    return fail("quantise to NVFP4: expected a finite shared amax of at least {}, found {}", amax,
                *shared_amax);
  }
  amax = shared_amax.value_or(amax);
  NvFp4Matrix out{.rows = in.size(0), .cols = in.size(1), .packed = {}, .scale = {}};
  out.scale_2 = amax > 0.0F ? std::max(amax / (kE2M1Max * kE4M3Max), kMinScale) : 1.0F;
  out.packed.resize(usize(in.numel() / 2));
  out.scale.resize(usize(in.numel() / kNvFp4Group));
  for (std::size_t group = 0; group < out.scale.size(); ++group) {
    const auto begin = checked_cast<std::int64_t>(group) * kNvFp4Group;
    const auto values =
        row_of(in, begin / out.cols).subspan(usize(begin % out.cols), usize(kNvFp4Group));
    out.scale[group] = encode_e4m3(amax_of(values) / kE2M1Max / out.scale_2);
    // A group far below the tensor's amax gets scale 0: its weights are 0 whatever the codes, so
    // write zeros.
    const float scale = decode_e4m3(out.scale[group]) * out.scale_2;
    if (scale > 0.0F) {
      encode_codes(&out.packed[usize(begin / 2)], values, scale);
    }
  }
  return out;
}

Expected<Fp8BlockMatrix> quantise_fp8_block(ConstF32Mat in) {
  if (Status status = check_input(in, 1); !status) {
    return status.failure();
  }
  Fp8BlockMatrix out{.rows = in.size(0), .cols = in.size(1), .codes = {}, .scale = {}};
  out.codes.resize(usize(in.numel()));
  for (std::int64_t top = 0; top < out.rows; top += kFp8Block) {
    const std::int64_t bottom = std::min(top + kFp8Block, out.rows);
    for (std::int64_t left = 0; left < out.cols; left += kFp8Block) {
      const std::int64_t width = std::min(kFp8Block, out.cols - left);
      float amax = 0.0F;
      for (std::int64_t row = top; row < bottom; ++row) {
        amax = std::max(amax, amax_of(row_of(in, row).subspan(usize(left), usize(width))));
      }
      const float scale = amax > 0.0F ? std::max(amax / kE4M3Max, kMinScale) : 1.0F;
      out.scale.push_back(scale);
      for (std::int64_t row = top; row < bottom; ++row) {
        for (std::int64_t col = left; col < left + width; ++col) {
          out.codes[usize(row * out.cols + col)] = encode_e4m3(in(row, col) / scale);
        }
      }
    }
  }
  return out;
}

}  // namespace tandem
