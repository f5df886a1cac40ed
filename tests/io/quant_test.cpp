#include "tensor/quant.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/checked_cast.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Value of a small float by the definition of its fields, in double: the tests' own tables.
double field_value(int code, int exponent_bits, int mantissa_bits, int bias) {
  const int sign = code >> (exponent_bits + mantissa_bits) & 1;
  const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const double fraction = std::ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
  return sign != 0 ? -magnitude : magnitude;
}
double e2m1_value(int code) {
  return field_value(code, 2, 1, 1);
}
double e4m3_value(int code) {
  return field_value(code, 4, 3, 7);
}

/// The code in [first, last] whose value is nearest to `x`, ties to the even code.
template <typename Value>
int nearest_code(double x, int first, int last, Value value) {
  int best = first;
  for (int code = first + 1; code <= last; ++code) {
    const double gain = std::abs(x - value(best)) - std::abs(x - value(code));
    if (gain > 0 || (gain == 0 && code % 2 == 0)) {
      best = code;
    }
  }
  return best;
}

/// Inputs where rounding can go wrong: every value, every midpoint of neighbours, and one fp32 step
/// to each side.
template <typename Value>
std::vector<float> rounding_probes(int last_positive, Value value) {
  std::vector<float> probes;
  for (int code = 0; code <= last_positive; ++code) {
    for (const double x : {value(code), (value(code) + value(code + (code < last_positive))) / 2}) {
      const auto center = static_cast<float>(x);
      for (const float v : {center, std::nextafter(center, kInf), std::nextafter(center, -kInf)}) {
        probes.push_back(v);
        probes.push_back(-v);
      }
    }
  }
  return probes;
}

float uniform(std::uint64_t& state) {
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return static_cast<float>(state >> 40) * 0x1p-24F;
}

/// Reproducible values in (-1, 1) times 2^[-6, 6].
std::vector<float> wide_values(std::int64_t count, std::uint64_t seed) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const float mantissa = 2.0F * uniform(seed) - 1.0F;
    values.push_back(std::ldexp(mantissa, static_cast<int>(uniform(seed) * 13.0F) - 6));
  }
  return values;
}

ConstF32Mat matrix(const std::vector<float>& values, std::int64_t rows) {
  return {values.data(), {rows, isize(values) / rows}};
}

static_assert(decode_e2m1(0x7) == 6.0F && encode_e2m1(-1.5F) == 0xB);
static_assert(decode_e4m3(0x7E) == 448.0F && encode_e4m3(1.0F) == 0x38);
static_assert(*decode_e8m0(127) == 1.0F && !decode_e8m0(0xFF));

TEST(Quant, E2M1DecodesEveryCode) {
  for (int code = 0; code < 16; ++code) {
    const float value = decode_e2m1(static_cast<std::uint8_t>(code));
    EXPECT_EQ(value, e2m1_value(code)) << code;
    EXPECT_EQ(std::signbit(value), code >= 8) << code;
    EXPECT_EQ(encode_e2m1(value), code);
  }
}

TEST(Quant, E2M1EncodesToTheNearestCodeTiesToEven) {
  std::vector<float> probes = rounding_probes(7, e2m1_value);
  for (const float v : wide_values(20000, 1)) {
    probes.push_back(v);
  }
  for (const float v : probes) {
    const int expected =
        nearest_code(std::abs(double{v}), 0, 7, e2m1_value) + (std::signbit(v) ? 8 : 0);
    ASSERT_EQ(encode_e2m1(v), expected) << v;
  }
  EXPECT_EQ(encode_e2m1(kInf), 0x7);
  EXPECT_EQ(encode_e2m1(-1e30F), 0xF);
  EXPECT_EQ(encode_e2m1(-0.0F), 0x8);
}

TEST(Quant, E4M3DecodesEveryCode) {
  for (int code = 0; code < 256; ++code) {
    const float value = decode_e4m3(static_cast<std::uint8_t>(code));
    EXPECT_EQ(std::signbit(value), code >= 128) << code;
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value)) << code;
    } else {
      EXPECT_EQ(value, e4m3_value(code)) << code;
    }
    EXPECT_EQ(encode_e4m3(value), code);
  }
}

TEST(Quant, E4M3EncodesToTheNearestCodeTiesToEven) {
  std::vector<float> probes = rounding_probes(0x7E, e4m3_value);
  for (const float v : wide_values(20000, 2)) {
    probes.push_back(v);
    probes.push_back(v * 0x1p-7F);  // subnormal range
  }
  for (const float v : probes) {
    const int expected =
        nearest_code(std::abs(double{v}), 0, 0x7E, e4m3_value) + (std::signbit(v) ? 0x80 : 0);
    ASSERT_EQ(encode_e4m3(v), expected) << v;
  }
  EXPECT_EQ(encode_e4m3(460.0F), 0x7E);
  EXPECT_EQ(encode_e4m3(1e30F), 0x7E);
  EXPECT_EQ(encode_e4m3(-kInf), 0xFE);
  EXPECT_EQ(encode_e4m3(-0.0F), 0x80);
  EXPECT_EQ(encode_e4m3(std::numeric_limits<float>::denorm_min()), 0x00);
}

TEST(Quant, E8M0DecodesEveryByteAndReportsNaN) {
  for (int byte = 0; byte < 255; ++byte) {
    const auto value = decode_e8m0(static_cast<std::uint8_t>(byte));
    ASSERT_TRUE(value.has_value()) << byte;
    EXPECT_EQ(*value, std::ldexp(1.0, byte - 127)) << byte;
  }
  EXPECT_FALSE(decode_e8m0(0xFF).has_value());
}

// Spec §10.1: byte 0xB2 with scale byte 124 -> [0.125, -0.1875].
TEST(Quant, HandNumbersOfTheSpecAndNibbleOrder) {
  MxFp4Matrix mx{.rows = 1, .cols = 32, .packed = std::vector<std::uint8_t>(16), .scale = {124}};
  mx.packed[0] = 0xB2;
  mx.packed[15] = 0x70;
  const auto mx_out = dequantise(mx.view());
  ASSERT_TRUE(mx_out.ok()) << mx_out.message();
  EXPECT_EQ((*mx_out)[0], 0.125F);
  EXPECT_EQ((*mx_out)[1], -0.1875F);
  EXPECT_EQ((*mx_out)[30], 0.0F);
  EXPECT_EQ((*mx_out)[31], 0.75F);

  NvFp4Matrix nv{
      .rows = 1, .cols = 32, .packed = mx.packed, .scale = {0x38, 0x38}, .scale_2 = 0.125F};
  const auto nv_out = dequantise(nv.view());
  ASSERT_TRUE(nv_out.ok()) << nv_out.message();
  EXPECT_EQ(*nv_out, *mx_out);
}

// The kernels multiply the scales first (ops/gemm.h); the other order differs in the last bit.
TEST(Quant, NvFp4RoundsTheProductOfTheScalesFirst) {
  NvFp4Matrix nv{.rows = 1, .cols = 16, .packed = {}, .scale = {0}, .scale_2 = 0.0037F};
  for (unsigned code = 0; code < 16; code += 2) {
    nv.packed.push_back(static_cast<std::uint8_t>(code | (code + 1) << 4));
  }
  int differs = 0;
  for (int scale = 0; scale < 0x7F; ++scale) {
    nv.scale[0] = static_cast<std::uint8_t>(scale);
    const std::vector<float> out = dequantise(nv.view()).value_or_throw();
    const float block = decode_e4m3(nv.scale[0]);
    const float factor = block * nv.scale_2;
    for (std::size_t code = 0; code < 16; ++code) {
      const float value = decode_e2m1(static_cast<std::uint8_t>(code));
      EXPECT_EQ(out[code], value * factor) << scale << " " << code;
      differs += static_cast<int>(out[code] != value * block * nv.scale_2);
    }
  }
  EXPECT_GT(differs, 0);
}

// One distinct code and scale for each place: any mix-up of row, column, nibble or group shows.
TEST(Quant, Fp4LayoutOfAnAsymmetricMatrix) {
  constexpr std::int64_t kRows = 3;
  constexpr std::int64_t kCols = 64;
  MxFp4Matrix mx{.rows = kRows, .cols = kCols, .packed = {}, .scale = {}};
  NvFp4Matrix nv{.rows = kRows, .cols = kCols, .packed = {}, .scale = {}, .scale_2 = 0.75F};
  const auto code_at = [](std::int64_t row, std::int64_t col) {
    return static_cast<int>((5 * row + 3 * col + col / 16) % 16);
  };
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t col = 0; col < kCols; col += 2) {
      mx.packed.push_back(
          static_cast<std::uint8_t>(code_at(row, col) + 16 * code_at(row, col + 1)));
    }
    for (std::int64_t group = 0; group < kCols / 32; ++group) {
      mx.scale.push_back(static_cast<std::uint8_t>(120 + 3 * row + group));
    }
    for (std::int64_t group = 0; group < kCols / 16; ++group) {
      nv.scale.push_back(static_cast<std::uint8_t>(0x21 + 9 * row + group));
    }
  }
  nv.packed = mx.packed;
  const auto mx_out = dequantise(mx.view());
  const auto nv_out = dequantise(nv.view());
  ASSERT_TRUE(mx_out.ok() && nv_out.ok());
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t col = 0; col < kCols; ++col) {
      const double value = e2m1_value(code_at(row, col));
      const auto at = usize(row * kCols + col);
      EXPECT_EQ((*mx_out)[at], std::ldexp(value, static_cast<int>(120 + 3 * row + col / 32) - 127));
      EXPECT_EQ((*nv_out)[at],
                static_cast<float>(value * e4m3_value(static_cast<int>(0x21 + 9 * row + col / 16)) *
                                   0.75))
          << row << ", " << col;
    }
  }
}

TEST(Quant, Fp8BlocksAreRaggedAtBothEdges) {
  constexpr std::int64_t kRows = 130;
  constexpr std::int64_t kCols = 259;
  Fp8BlockMatrix m{.rows = kRows, .cols = kCols, .codes = {}, .scale = {1, 2, 4, 8, 16, 32}};
  const auto code_at = [](std::int64_t row, std::int64_t col) {
    return static_cast<int>((7 * row + col) % 0x7F + (row + col) % 2 * 0x80);
  };
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t col = 0; col < kCols; ++col) {
      m.codes.push_back(static_cast<std::uint8_t>(code_at(row, col)));
    }
  }
  const auto out = dequantise(m.view());
  ASSERT_TRUE(out.ok()) << out.message();
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t col = 0; col < kCols; ++col) {
      const auto block = static_cast<int>(row / 128 * 3 + col / 128);
      ASSERT_EQ((*out)[usize(row * kCols + col)], std::ldexp(e4m3_value(code_at(row, col)), block));
    }
  }
}

TEST(Quant, Fp8ScaleShapesOfTheSpec) {
  const auto accepts = [](std::vector<std::int64_t> shape, std::int64_t rows, std::int64_t cols) {
    return check_fp8_scale_shape(shape, rows, cols).ok();
  };
  EXPECT_TRUE(accepts({5, 1, 56, 1}, 576, 7168));
  EXPECT_TRUE(accepts({1, 1, 56, 1}, 96, 7168));
  EXPECT_TRUE(accepts({96, 1, 1, 1}, 12288, 128));
  EXPECT_TRUE(accepts({5, 56}, 576, 7168));
  EXPECT_FALSE(accepts({4, 1, 56, 1}, 576, 7168));
  EXPECT_FALSE(accepts({56, 1, 5, 1}, 576, 7168));
  EXPECT_FALSE(accepts({5, 56, 1, 1}, 576, 7168));
  EXPECT_FALSE(accepts({280}, 576, 7168));
  EXPECT_THAT(
      check_fp8_scale_shape(std::vector<std::int64_t>{4, 56}, 576, 7168).message(),
      HasSubstr("expected shape [5, 1, 56, 1] or [5, 56] for weight [576, 7168], found [4, 56]"));
}

TEST(Quant, NaNScalesAreReportedWithTheirPlace) {
  MxFp4Matrix mx = *quantise_mxfp4(matrix(std::vector<float>(128, 1.0F), 2));
  mx.scale[3] = 0xFF;
  EXPECT_THAT(validate(mx.view()).message(), HasSubstr("MXFP4 scale[1, 1]"));
  std::vector<float> row(64);
  EXPECT_TRUE(dequantise_row(mx.view(), 0, row).ok());
  EXPECT_THAT(dequantise_row(mx.view(), 1, row).message(), HasSubstr("NaN"));
  EXPECT_FALSE(dequantise(mx.view()).ok());

  NvFp4Matrix nv = *quantise_nvfp4(matrix(std::vector<float>(64, 1.0F), 2));
  nv.scale[2] = 0x7F;
  EXPECT_THAT(validate(nv.view()).message(), HasSubstr("NVFP4 scale[1, 0]"));
  EXPECT_FALSE(dequantise_row(nv.view(), 1, std::span(row).first(32)).ok());
  nv.scale[2] = 0x38;
  nv.scale_2 = kNaN;
  EXPECT_THAT(validate(nv.view()).message(), HasSubstr("scale_2"));

  Fp8BlockMatrix fp8 = *quantise_fp8_block(matrix(std::vector<float>(3 * 129, 1.0F), 3));
  fp8.scale[1] = kInf;
  EXPECT_THAT(validate(fp8.view()).message(), HasSubstr("FP8 scale[0, 1]"));
  fp8.scale[1] = 1.0F;
  fp8.codes[129 + 4] = 0xFF;
  EXPECT_THAT(validate(fp8.view()).message(), HasSubstr("FP8 weight[1, 4]"));
  EXPECT_FALSE(dequantise(fp8.view()).ok());
}

TEST(Quant, ScaleBytesThatLeaveFp32AreReported) {
  MxFp4Matrix mx{.rows = 1, .cols = 32, .packed = std::vector<std::uint8_t>(16), .scale = {254}};
  mx.packed[7] = 0x02;  // 1.0 * 2^127 fits
  EXPECT_TRUE(dequantise(mx.view()).ok());
  mx.packed[7] = 0x04;  // 2.0 * 2^127 does not
  EXPECT_THAT(dequantise(mx.view()).message(), HasSubstr("group [0, 0]: scale byte 254"));
  mx.scale[0] = 253;
  mx.packed[7] = 0x60;
  EXPECT_FALSE(dequantise(mx.view()).ok());
}

TEST(Quant, ShapesThatDoNotFitAreRefused) {
  const std::vector<float> values(2 * 48, 1.0F);
  EXPECT_THAT(quantise_mxfp4(matrix(values, 2)).message(), HasSubstr("multiple of the group 32"));
  EXPECT_TRUE(quantise_nvfp4(matrix(values, 2)).ok());
  EXPECT_THAT(quantise_nvfp4(matrix(values, 4)).message(), HasSubstr("multiple of the group 16"));
  MxFp4Matrix mx = *quantise_mxfp4(matrix(std::vector<float>(64, 1.0F), 1));
  MxFp4View view = mx.view();
  view.scale = {mx.scale.data(), {1, 1}};
  EXPECT_THAT(validate(view).message(), HasSubstr("expected shape [1, 2]"));
  // NVFP4 scales read as MXFP4 ones, and the other way round, do not fit either.
  EXPECT_FALSE(validate(NvFp4View{.packed = view.packed, .scale = mx.view().scale}).ok());
}

TEST(Quant, NonFiniteInputIsRefused) {
  for (const float bad : {kNaN, kInf, -kInf}) {
    std::vector<float> values(64, 1.0F);
    values[33] = bad;
    EXPECT_THAT(quantise_mxfp4(matrix(values, 2)).message(), HasSubstr("row 1"));
    EXPECT_FALSE(quantise_nvfp4(matrix(values, 2)).ok());
    EXPECT_FALSE(quantise_fp8_block(matrix(values, 2)).ok());
  }
}

TEST(Quant, ZeroGroupsAndEmptyMatrices) {
  std::vector<float> values(64, 0.0F);
  values[40] = 3.0F;
  const auto mx = quantise_mxfp4(matrix(values, 1));
  EXPECT_THAT(mx->scale, ElementsAre(0, 126));  // floor(log2(3)) - 2 + 127
  EXPECT_EQ(*dequantise(mx->view()), values);
  const auto nv = quantise_nvfp4(matrix(values, 1));
  EXPECT_THAT(nv->scale, ElementsAre(0, 0, 0x7E, 0));
  EXPECT_FLOAT_EQ((*dequantise(nv->view()))[40], 3.0F);
  const std::vector<float> zeros(130, 0.0F);
  const auto fp8 = quantise_fp8_block(matrix(zeros, 1));
  EXPECT_THAT(fp8->scale, ElementsAre(1.0F, 1.0F));
  EXPECT_EQ(*dequantise(fp8->view()), zeros);
  EXPECT_EQ(quantise_nvfp4(matrix(std::vector<float>(16, 0.0F), 1))->scale_2, 1.0F);
  EXPECT_TRUE(quantise_mxfp4({nullptr, {0, 64}}).ok());
  EXPECT_TRUE(quantise_fp8_block({nullptr, {5, 0}}).ok());
}

// Amax at the bottom and the top of fp32: scales clamp, nothing becomes NaN or infinite.
TEST(Quant, ExtremeMagnitudes) {
  for (const float amax : {std::numeric_limits<float>::denorm_min(), 0x1p-126F, 0x1.8p-125F,
                           std::numeric_limits<float>::max()}) {
    std::vector<float> values(32, 0.0F);
    values[3] = -amax;
    const auto mx = dequantise(quantise_mxfp4(matrix(values, 1))->view());
    const auto nv = dequantise(quantise_nvfp4(matrix(values, 1))->view());
    const auto fp8 = dequantise(quantise_fp8_block(matrix(values, 1))->view());
    ASSERT_TRUE(mx.ok() && nv.ok() && fp8.ok()) << amax;
    for (const auto& out : {*mx, *nv, *fp8}) {
      EXPECT_LE(out[3], 0.0F);
      // NVFP4's group scale may round up, by half a step of E4M3: 1/16 of itself.
      EXPECT_GE(double{out[3]}, -double{amax} * (1.0 + 1.0 / 16));
      if (amax >= 0x1p-120F) {
        EXPECT_LE(out[3], -0.75F * amax);  // 6 of just under 8: MXFP4's saturation
      }
    }
  }
}

/// Half the distance between the E2M1 values around |y|; beyond 6 the distance to 6.
double e2m1_bound(double y) {
  const double half_step = y < 2 ? 0.25 : y < 4 ? 0.5 : 1.0;
  return y > 6 ? y - 6 : half_step;
}

TEST(Quant, Fp4ErrorIsWithinHalfAStepOfItsScale) {
  constexpr std::int64_t kRows = 7;
  const std::vector<float> values = wide_values(kRows * 96, 3);
  const auto mx = quantise_mxfp4(matrix(values, kRows));
  const auto nv = quantise_nvfp4(matrix(values, kRows));
  const auto mx_out = dequantise(mx->view());
  const auto nv_out = dequantise(nv->view());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = values[i];
    const double mx_scale = std::ldexp(1.0, mx->scale[i / 32] - 127);
    ASSERT_LT(std::abs(x) / mx_scale, 8.0);
    ASSERT_LE(std::abs(x - (*mx_out)[i]), mx_scale * e2m1_bound(std::abs(x) / mx_scale)) << i;
    // Three fp32 roundings: of the scale product, of the quotient when encoding, of the product
    // when decoding.
    const double nv_scale = e4m3_value(nv->scale[i / 16]) * double{nv->scale_2};
    const double bound =
        nv_scale == 0 ? std::abs(x) : nv_scale * e2m1_bound(std::abs(x) / nv_scale);
    ASSERT_LE(std::abs(x - (*nv_out)[i]), bound + 3 * 0x1p-24 * std::abs(x)) << i;
  }
}

TEST(Quant, Fp8ErrorIsWithinHalfAStepOfItsScale) {
  constexpr std::int64_t kRows = 131;
  constexpr std::int64_t kCols = 150;
  const std::vector<float> values = wide_values(kRows * kCols, 4);
  const auto m = quantise_fp8_block(matrix(values, kRows));
  ASSERT_EQ(m->scale.size(), 4U);
  const auto out = dequantise(m->view());
  for (std::int64_t i = 0; i < isize(values); ++i) {
    const double x = values[usize(i)];
    const double scale = m->scale[usize(i / kCols / 128 * 2 + i % kCols / 128)];
    const int exponent = x == 0 ? -6 : std::max(std::ilogb(x / scale), -6);
    const double half_step = std::ldexp(scale, exponent - 4);
    // Two fp32 roundings: of the quotient when encoding and of the product when decoding.
    ASSERT_LE(std::abs(x - (*out)[usize(i)]), half_step + 2 * 0x1p-24 * std::abs(x)) << i;
  }
}

TEST(Quant, QuantisingDecodedValuesChangesNothing) {
  const std::vector<float> values = wide_values(5 * 64, 5);
  const auto mx = quantise_mxfp4(matrix(values, 5));
  const auto mx_again = quantise_mxfp4(matrix(*dequantise(mx->view()), 5));
  EXPECT_EQ(mx_again->packed, mx->packed);
  EXPECT_EQ(mx_again->scale, mx->scale);

  // With amax = 2688 * 2^-3 the scale is a power of two and every decoded value exact. Group scales
  // that are normal E4M3 numbers are then found again; subnormal ones may not be (their neighbours
  // are too far apart).
  std::vector<float> nv_values = wide_values(5 * 64, 6);
  for (std::size_t i = 0; i < nv_values.size(); i += 16) {
    nv_values[i] = 2.0F + static_cast<float>(i);
  }
  nv_values[16] = 336.0F;
  const auto nv = quantise_nvfp4(matrix(nv_values, 5));
  ASSERT_EQ(nv->scale_2, 0.125F);
  const auto nv_again = quantise_nvfp4(matrix(*dequantise(nv->view()), 5));
  EXPECT_EQ(nv_again->packed, nv->packed);
  EXPECT_EQ(nv_again->scale, nv->scale);
  EXPECT_EQ(nv_again->scale_2, nv->scale_2);

  // FP8: the recomputed scale may differ in its last bit (448*s rounds), the codes may not.
  const auto fp8 = quantise_fp8_block(matrix(values, 5));
  const auto fp8_again = quantise_fp8_block(matrix(*dequantise(fp8->view()), 5));
  EXPECT_EQ(fp8_again->codes, fp8->codes);
  EXPECT_FLOAT_EQ(fp8_again->scale[0], fp8->scale[0]);
}

TEST(Quant, SharedAmaxGivesPairsOneScale) {
  const std::vector<float> w1 = wide_values(64, 7);
  std::vector<float> w3 = w1;
  w3[5] = 2688.0F;
  const auto a = quantise_nvfp4(matrix(w1, 2), 2688.0F);
  const auto b = quantise_nvfp4(matrix(w3, 2));
  EXPECT_EQ(a->scale_2, 1.0F);
  EXPECT_EQ(b->scale_2, 1.0F);
  EXPECT_FALSE(quantise_nvfp4(matrix(w3, 2), 5.0F).ok());
  EXPECT_FALSE(quantise_nvfp4(matrix(w1, 2), kNaN).ok());
}

}  // namespace
}  // namespace tandem
