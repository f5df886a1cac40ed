// gemm_ref.h — oracle of ops/gemm.h: plain loops, templated on the scalar. Weights enter as their
// dequantised values; dequantize() makes them, in fp32, one code at a time from the definitions of
// the formats (spec/kimi-k3.md section 7).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/checked_cast.h"
#include "ops/gemm.h"
#include "tensor/dtype.h"

namespace tandem::ref {

/// E2M1: sign, 2 exponent bits (bias 1), 1 mantissa bit.
[[nodiscard]] inline float e2m1_value(unsigned code) {
  constexpr float kValues[8] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  const float value = kValues[code & 7U];
  return (code & 8U) != 0 ? -value : value;
}

/// E4M3 (the "fn" kind): bias 7, no infinities, S.1111.111 is NaN.
[[nodiscard]] inline float e4m3_value(unsigned code) {
  const unsigned exponent = (code >> 3U) & 15U;
  const unsigned mantissa = code & 7U;
  if (exponent == 15 && mantissa == 7) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                    : std::ldexp(static_cast<float>(8U + mantissa),
                                                 static_cast<int>(exponent) - 10);
  return (code & 0x80U) != 0 ? -value : value;
}

/// E8M0: 2^(code - 127), 255 is NaN.
[[nodiscard]] inline float e8m0_value(unsigned code) {
  return code == 255 ? std::numeric_limits<float>::quiet_NaN()
                     : std::ldexp(1.0F, static_cast<int>(code) - 127);
}

/// The fp32 values of a weight, [rows, cols] contiguous.
[[nodiscard]] inline std::vector<float> dequantize(const WeightRef& w) {
  std::vector<float> out(usize(w.rows * w.cols));
  const auto* bytes = static_cast<const std::uint8_t*>(w.data);
  const auto* scale_codes = static_cast<const std::uint8_t*>(w.scales);
  for (std::int64_t n = 0; n < w.rows; ++n) {
    for (std::int64_t k = 0; k < w.cols; ++k) {
      float& value = out[usize(n * w.cols + k)];
      const auto code4 = [&] {
        const unsigned byte = bytes[(n * w.cols + k) / 2];
        return k % 2 == 0 ? byte & 15U : byte >> 4U;
      };
      switch (w.format) {
        case WeightFormat::kF32:
          value = static_cast<const float*>(w.data)[n * w.row_stride + k];
          break;
        case WeightFormat::kBF16:
          value = static_cast<const BF16*>(w.data)[n * w.row_stride + k].to_float();
          break;
        case WeightFormat::kMxFp4:
          value = e2m1_value(code4()) * e8m0_value(scale_codes[n * (w.cols / 32) + k / 32]);
          break;
        case WeightFormat::kNvFp4: {
          const float scale = e4m3_value(scale_codes[n * (w.cols / 16) + k / 16]) * w.scale_2;
          value = e2m1_value(code4()) * scale;
          break;
        }
        case WeightFormat::kFp8Block:
          value = e4m3_value(bytes[n * w.cols + k]) *
                  static_cast<const float*>(w.scales)[n / 128 * ((w.cols + 127) / 128) + k / 128];
          break;
      }
    }
  }
  return out;
}

/// y[t, n] = (accumulate ? y[t, n] : 0) + sum over k of x[t, k] w[n, k]; all contiguous.
template <typename Scalar>
void linear(Scalar* y, const Scalar* x, const Scalar* w, std::int64_t rows, std::int64_t out,
            std::int64_t in, bool accumulate = false) {
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t n = 0; n < out; ++n) {
      Scalar sum = accumulate ? y[t * out + n] : Scalar(0);
      for (std::int64_t k = 0; k < in; ++k) {
        sum = std::fma(x[t * in + k], w[n * in + k], sum);
      }
      y[t * out + n] = sum;
    }
  }
}

/// d_w[n, k] += sum over t of d_y[t, n] x[t, k].
template <typename Scalar>
void weight_grad(Scalar* d_w, const Scalar* d_y, const Scalar* x, std::int64_t rows,
                 std::int64_t out, std::int64_t in) {
  for (std::int64_t n = 0; n < out; ++n) {
    for (std::int64_t k = 0; k < in; ++k) {
      Scalar sum = d_w[n * in + k];
      for (std::int64_t t = 0; t < rows; ++t) {
        sum = std::fma(d_y[t * out + n], x[t * in + k], sum);
      }
      d_w[n * in + k] = sum;
    }
  }
}

}  // namespace tandem::ref
