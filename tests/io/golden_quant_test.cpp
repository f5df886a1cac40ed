// Code points, packing and quantisation of the 4- and 8-bit formats against an independent numpy
// program (tools/golden/quant_oracle.py): every code, every tie, whole matrices.
#include <cmath>
#include <vector>

#include "support/golden.h"
#include "tensor/quant.h"

namespace tandem::test {
namespace {

const GoldenFile& golden() {
  static const GoldenFile file("quant.safetensors");
  return file;
}

/// quant_oracle.py, test_matrix(): the source matrices are a formula.
std::vector<float> test_matrix(std::int64_t rows, std::int64_t cols) {
  std::vector<float> values;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const double h = hash32(static_cast<std::uint32_t>(r * cols + c));
      const bool zero = (r >= 128 && c >= 128) || (r == rows / 2 && c < 32);
      const double x = std::ldexp((h - 0x1p31) * 0x1p-28, static_cast<int>(r % 7) - 3);
      values.push_back(zero ? 0.0F : static_cast<float>(x));
    }
  }
  return values;
}
ConstF32Mat matrix(const std::vector<float>& values, std::int64_t rows) {
  return {values.data(), {rows, isize(values) / rows}};
}

TEST(GoldenQuant, EveryCodePoint) {
  const auto e2m1 = golden().floats("e2m1.values");
  ASSERT_EQ(e2m1.size(), 16U);
  for (std::size_t code = 0; code < 16; ++code) {
    const float value = decode_e2m1(static_cast<std::uint8_t>(code));
    EXPECT_EQ(value, e2m1[code]) << code;
    EXPECT_EQ(std::signbit(value), code >= 8) << code;
  }
  const auto e4m3 = golden().floats("e4m3.values");
  const auto e8m0 = golden().floats("e8m0.values");
  ASSERT_EQ(e4m3.size(), 256U);
  ASSERT_EQ(e8m0.size(), 256U);
  for (std::size_t code = 0; code < 256; ++code) {
    const auto byte = static_cast<std::uint8_t>(code);
    const float value = decode_e4m3(byte);
    EXPECT_EQ(std::isnan(value), std::isnan(e4m3[code])) << code;
    EXPECT_TRUE(std::isnan(value) || value == e4m3[code]) << code;
    EXPECT_EQ(decode_e8m0(byte).has_value(), !std::isnan(e8m0[code])) << code;
    EXPECT_TRUE(std::isnan(e8m0[code]) || *decode_e8m0(byte) == e8m0[code]) << code;
  }
}

TEST(GoldenQuant, EncodingRoundsToNearestEvenAndSaturates) {
  const auto e2m1_in = golden().floats("e2m1.encode_in");
  const auto e2m1_code = golden().bytes("e2m1.encode_code");
  for (std::size_t i = 0; i < e2m1_in.size(); ++i) {
    EXPECT_EQ(encode_e2m1(e2m1_in[i]), e2m1_code[i]) << e2m1_in[i];
  }
  const auto e4m3_in = golden().floats("e4m3.encode_in");
  const auto e4m3_code = golden().bytes("e4m3.encode_code");
  ASSERT_EQ(e4m3_in.size(), e4m3_code.size());
  for (std::size_t i = 0; i < e4m3_in.size(); ++i) {
    EXPECT_EQ(encode_e4m3(e4m3_in[i]), e4m3_code[i]) << e4m3_in[i];
  }
}

TEST(GoldenQuant, TheSourceMatrixIsTheFormula) {
  EXPECT_EQ(test_matrix(5, 64), golden().floats("test_matrix.5x64"));
}

TEST(GoldenQuant, MxFp4) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{5, 64}, {33, 96}}) {
    const std::string key = fmt::format("mxfp4.{}x{}", rows, cols);
    const MxFp4Matrix q = quantise_mxfp4(matrix(test_matrix(rows, cols), rows)).value_or_throw();
    EXPECT_EQ(q.packed, golden().bytes(key + ".packed"));
    EXPECT_EQ(q.scale, golden().bytes(key + ".scale"));
    const auto expected = golden().floats(key + ".dequantized");
    EXPECT_EQ(dequantise(q.view()).value_or_throw(), expected);
    // The lossless cast to NVFP4: the same nibbles with other scales are the same values.
    const NvFp4Matrix nv{rows, cols, q.packed, golden().bytes(key + ".as_nvfp4_scale"),
                         golden().floats(key + ".as_nvfp4_scale_2")[0]};
    EXPECT_EQ(dequantise(nv.view()).value_or_throw(), expected);
  }
}

// A value is code * (block scale * scale_2), two fp32 roundings of 2^-24 each; the reference is the
// exact product, rounded once. NVFP4 scales are quotients of fp32 values, so codes at a tie of the
// exact arithmetic could differ; with these matrices none does.
TEST(GoldenQuant, NvFp4) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{5, 48}, {33, 96}}) {
    const std::string key = fmt::format("nvfp4.{}x{}", rows, cols);
    const NvFp4Matrix q = quantise_nvfp4(matrix(test_matrix(rows, cols), rows)).value_or_throw();
    EXPECT_EQ(q.packed, golden().bytes(key + ".packed"));
    EXPECT_EQ(q.scale, golden().bytes(key + ".scale"));
    EXPECT_EQ(q.scale_2, golden().floats(key + ".scale_2")[0]);
    const auto expected = golden().floats(key + ".dequantized");
    const auto actual = dequantise(q.view()).value_or_throw();
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      EXPECT_NEAR(double{actual[i]}, double{expected[i]}, 3 * 0x1p-24 * std::abs(expected[i])) << i;
    }
  }
}

TEST(GoldenQuant, Fp8Block) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{130, 200}, {3, 129}}) {
    const std::string key = fmt::format("fp8.{}x{}", rows, cols);
    const Fp8BlockMatrix q =
        quantise_fp8_block(matrix(test_matrix(rows, cols), rows)).value_or_throw();
    EXPECT_EQ(q.codes, golden().bytes(key + ".codes"));
    EXPECT_EQ(q.scale, golden().floats(key + ".scale"));
    const auto last3 = golden().floats(key + ".dequantized_last3");
    const auto all = dequantise(q.view()).value_or_throw();
    const std::vector<float> actual(all.end() - isize(last3), all.end());
    EXPECT_EQ(actual, last3);  // one product: rounded once on both sides
  }
}

}  // namespace
}  // namespace tandem::test
