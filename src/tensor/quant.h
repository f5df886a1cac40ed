// quant.h — the three weight formats of released checkpoints: MXFP4, NVFP4 and block-scaled FP8.
// Scalar codecs, views of stored matrices, and the plain row loops that loaders and tests use
// (kernels have their own fast decoders). Source: shared spec kimi-k3.md §7.4, §7.5; OCP
// Microscaling Formats v1.0 (E2M1, E4M3, E8M0).
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/error.h"
#include "tensor/view.h"

namespace tandem {

/// Decoded values of the 16 E2M1 codes: bit 3 is the sign, the rest 0, 0.5, 1, 1.5, 2, 3, 4, 6.
inline constexpr std::array<float, 16> kE2M1Values{0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                                   4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                                   -2.0F, -3.0F, -4.0F, -6.0F};
inline constexpr float kE2M1Max = 6.0F;
inline constexpr float kE4M3Max = 448.0F;
/// The one E8M0 byte without a value. A file that holds it is refused, never decoded.
inline constexpr std::uint8_t kE8M0NaN = 0xFF;

inline constexpr std::int64_t kMxFp4Group = 32;
inline constexpr std::int64_t kNvFp4Group = 16;
inline constexpr std::int64_t kFp8Block = 128;

/// Value of the low 4 bits of `code`.
[[nodiscard]] constexpr float decode_e2m1(std::uint8_t code) {
  return kE2M1Values[code & 0xFU];
}

/// Nearest E2M1 code, ties to the even code, saturating at ±6; the sign of zero is kept.
/// E2M1 has no NaN: a NaN becomes a zero, so callers refuse non-finite input first.
[[nodiscard]] constexpr std::uint8_t encode_e2m1(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto magnitude = std::bit_cast<float>(bits & 0x7FFFFFFFU);
  // One comparison per midpoint between neighbours; >= where the upper neighbour's code is the even
  // one.
  const int code = int{magnitude > 0.25F} + int{magnitude >= 0.75F} + int{magnitude > 1.25F} +
                   int{magnitude >= 1.75F} + int{magnitude > 2.5F} + int{magnitude >= 3.5F} +
                   int{magnitude > 5.0F};
  return static_cast<std::uint8_t>((bits >> 28 & 0x8U) | static_cast<std::uint32_t>(code));
}

/// Value of an E4M3 (FN) byte: no infinities; 0x7F and 0xFF are NaN.
[[nodiscard]] constexpr float decode_e4m3(std::uint8_t code) {
  const std::uint32_t sign = std::uint32_t{code} >> 7 << 31;
  const std::uint32_t rest = code & 0x7FU;
  if (rest == 0x7FU) {
    return std::bit_cast<float>(sign | 0x7FC00000U);
  }
  if (rest < 8U) {  // subnormal: multiples of 2^-9
    const float magnitude = static_cast<float>(rest) * 0x1p-9F;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((rest << 20) + (std::uint32_t{127 - 7} << 23)));
}

/// Nearest E4M3 byte, ties to even, saturating at ±448 (infinities too); NaN stays NaN.
[[nodiscard]] constexpr std::uint8_t encode_e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 24 & 0x80U;
  const std::uint32_t rest = bits & 0x7FFFFFFFU;
  const auto magnitude = std::bit_cast<float>(rest);
  if (rest > 0x7F800000U) {
    return static_cast<std::uint8_t>(sign | 0x7FU);
  }
  if (magnitude >= kE4M3Max) {
    return static_cast<std::uint8_t>(sign | 0x7EU);
  }
  if (magnitude < 0x1p-6F) {
    // 2^14 has an fp32 ulp of 2^-9, the E4M3 subnormal step: the addition itself rounds to nearest
    // even.
    const std::uint32_t steps =
        std::bit_cast<std::uint32_t>(magnitude + 0x1p14F) - std::bit_cast<std::uint32_t>(0x1p14F);
    return static_cast<std::uint8_t>(sign | steps);
  }
  const std::uint32_t rounded = (rest + 0x7FFFFU + (rest >> 20 & 1U)) >> 20;
  return static_cast<std::uint8_t>(sign | (rounded - (std::uint32_t{127 - 7} << 3)));
}

/// 2^(byte - 127), exact in fp32 (byte 0 is a subnormal); nullopt for kE8M0NaN.
[[nodiscard]] constexpr std::optional<float> decode_e8m0(std::uint8_t byte) {
  if (byte == kE8M0NaN) {
    return std::nullopt;
  }
  return std::bit_cast<float>(byte == 0 ? 0x00400000U : std::uint32_t{byte} << 23);
}

using ConstU8Mat = TensorView<const std::uint8_t, 2>;

/// A stored [N, K] matrix: value = e2m1(code) * 2^(scale - 127), low nibble = even column.
struct MxFp4View {
  ConstU8Mat packed;  // [N, K/2]
  ConstU8Mat scale;   // [N, K/32] E8M0

  [[nodiscard]] std::int64_t rows() const { return packed.size(0); }
  [[nodiscard]] std::int64_t cols() const { return packed.size(1) * 2; }
};

/// A stored [N, K] matrix: value = e2m1(code) * (e4m3(scale) * scale_2), both products rounded to
/// fp32 as in the kernels (ops/gemm.h), so that a dequantised master has the packed weight's bits.
struct NvFp4View {
  ConstU8Mat packed;  // [N, K/2]
  ConstU8Mat scale;   // [N, K/16] E4M3, row-major, not swizzled
  float scale_2 = 1.0F;

  [[nodiscard]] std::int64_t rows() const { return packed.size(0); }
  [[nodiscard]] std::int64_t cols() const { return packed.size(1) * 2; }
};

/// A stored [N, K] matrix: value = e4m3(code) * scale of its 128x128 block; edge blocks are ragged.
struct Fp8BlockView {
  ConstU8Mat codes;   // [N, K] E4M3
  ConstF32Mat scale;  // [ceil(N/128), ceil(K/128)]

  [[nodiscard]] std::int64_t rows() const { return codes.size(0); }
  [[nodiscard]] std::int64_t cols() const { return codes.size(1); }
};

struct MxFp4Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<std::uint8_t> packed;
  std::vector<std::uint8_t> scale;

  [[nodiscard]] MxFp4View view() const;  // valid while this object lives
};

struct NvFp4Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<std::uint8_t> packed;
  std::vector<std::uint8_t> scale;
  float scale_2 = 1.0F;

  [[nodiscard]] NvFp4View view() const;  // valid while this object lives
};

struct Fp8BlockMatrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<std::uint8_t> codes;
  std::vector<float> scale;

  [[nodiscard]] Fp8BlockView view() const;  // valid while this object lives
};

/// Whether the parts fit each other and every scale has a value; loaders call it once per matrix.
/// Errors: a Failure saying which part, where, and what was expected (shapes; NaN or infinite
/// scales; NaN weights).
[[nodiscard]] Status validate(const MxFp4View& matrix);
[[nodiscard]] Status validate(const NvFp4View& matrix);
[[nodiscard]] Status validate(const Fp8BlockView& matrix);

/// The stored scale of an [rows, cols] block-FP8 matrix may be [nb, 1, kb, 1] (ModelOpt) or [nb,
/// kb]: the same bytes.
[[nodiscard]] Status check_fp8_scale_shape(std::span<const std::int64_t> shape, std::int64_t rows,
                                           std::int64_t cols);

/// Row `row` as fp32.   Shapes: out [K]; parts as validate() wants them (TDM_CHECK).
/// Errors: a Failure naming row and column when a scale or weight is NaN or a product leaves fp32;
/// `out` is then unspecified.
[[nodiscard]] Status dequantise_row(const MxFp4View& matrix, std::int64_t row,
                                    std::span<float> out);
[[nodiscard]] Status dequantise_row(const NvFp4View& matrix, std::int64_t row,
                                    std::span<float> out);
[[nodiscard]] Status dequantise_row(const Fp8BlockView& matrix, std::int64_t row,
                                    std::span<float> out);

/// The whole matrix, row-major [N * K]; validates first.   Errors: as validate() and
/// dequantise_row().
[[nodiscard]] Expected<std::vector<float>> dequantise(const MxFp4View& matrix);
[[nodiscard]] Expected<std::vector<float>> dequantise(const NvFp4View& matrix);
[[nodiscard]] Expected<std::vector<float>> dequantise(const Fp8BlockView& matrix);

/// Nearest codes (ties to even), group scale 2^(floor(log2(amax)) - 2) clamped to E8M0; scale byte
/// 0 for a zero group. Values above 6 scales saturate, as in OCP MX.   Errors: K % 32 != 0; a value
/// that is not finite.
[[nodiscard]] Expected<MxFp4Matrix> quantise_mxfp4(ConstF32Mat in);

/// scale_2 = amax / (6*448), group scale = e4m3(group amax / 6 / scale_2), nearest codes.
/// `shared_amax`: the amax of several matrices that must share one scale_2 (w1 and w3 of an
/// expert). Errors: K % 16 != 0; a value that is not finite; shared_amax below the matrix's own.
[[nodiscard]] Expected<NvFp4Matrix> quantise_nvfp4(ConstF32Mat in,
                                                   std::optional<float> shared_amax = {});

/// Block scale = amax / 448 (1 for a zero block, at least 2^-126), nearest codes.   Errors: a value
/// that is not finite.
[[nodiscard]] Expected<Fp8BlockMatrix> quantise_fp8_block(ConstF32Mat in);

}  // namespace tandem
