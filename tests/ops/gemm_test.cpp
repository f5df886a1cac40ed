// Linear layers: against a double oracle, and bit for bit against the one chain that the contract
// allows, for any rows, threads, strides and formats.
#include "ops/gemm.h"

#include <limits>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include "ops/ref/gemm_ref.h"
#include "support/op_test.h"
#include "support/weights.h"

namespace tandem {
namespace {

using test::close;
using test::Format;
using test::kFormats;
using test::packed;
using test::RandomWeight;
using test::same_bits;
using test::Tensor;
using test::TestContext;

constexpr std::int64_t kSizes[] = {1, 15, 16, 17, 33, 80};

/// What linear() must return, bit for bit.
std::vector<float> chain(const Tensor& x, const std::vector<float>& w, std::int64_t rows,
                         std::int64_t out, std::int64_t in) {
  std::vector<float> y(usize(rows * out));
  ref::linear(y.data(), x.data(), w.data(), rows, out, in);
  return y;
}

std::vector<float> transposed(const std::vector<float>& w, std::int64_t rows, std::int64_t cols) {
  std::vector<float> result(w.size());
  for (std::int64_t n = 0; n < rows; ++n) {
    for (std::int64_t k = 0; k < cols; ++k) {
      result[usize(k * rows + n)] = w[usize(n * cols + k)];
    }
  }
  return result;
}

class LinearFormats : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(All, LinearFormats, ::testing::ValuesIn(kFormats),
                         [](const auto& format) { return std::string(format.param.name); });

TEST_P(LinearFormats, IsTheChainBitForBitAndNearTheDoubleOracle) {
  const TestContext ctx;
  for (const std::int64_t out : kSizes) {
    for (std::int64_t in : {1, 15, 16, 17, 33, 80, 129, 300, 530}) {
      in = GetParam().round_up(in);
      const RandomWeight weight(GetParam().format, out, in, mix_key({usize(out), usize(in)}));
      const std::vector<float> w = ref::dequantize(weight.ref());
      const PackedWeight pack = packed(*ctx, weight.ref());
      for (const std::int64_t rows : {1, 2, 3, 5, 8, 13, 29}) {
        const Tensor x = Tensor::normal(rows * in, mix_key({usize(rows), usize(in)}));
        Tensor y(rows * out);
        ops::linear(*ctx, y.mat(rows, out), Tensor(x).mat(rows, in), pack);
        ASSERT_TRUE(y.guards_intact());
        const std::vector<float> expected = chain(x, w, rows, out, in);
        ASSERT_TRUE(same_bits(y.data(), expected.data(), rows * out))
            << rows << " rows, " << out << " x " << in;

        const std::vector<double> xd = x.as_double();
        const std::vector<double> wd(w.begin(), w.end());
        std::vector<double> exact(usize(rows * out));
        ref::linear(exact.data(), xd.data(), wd.data(), rows, out, in);
        // |sum of products| is at most in * max|x| * max|w|.
        const double magnitude = static_cast<double>(in) * test::max_abs(xd) * test::max_abs(wd);
        ASSERT_TRUE(close(y.data(), exact, test::sum_tolerance(in, magnitude)));
      }
    }
  }
}

TEST_P(LinearFormats, RowDoesNotDependOnRowsOrThreads) {
  constexpr std::int64_t kRows = 40;
  for (const auto& [out, in_wanted] : {std::pair{17, 80}, {70, 33}, {160, 600}}) {
    const std::int64_t in = GetParam().round_up(in_wanted);
    const RandomWeight weight(GetParam().format, out, in, 3);
    Tensor x = Tensor::normal(kRows * in, 4);
    Tensor first(kRows * out);
    for (const int threads : {1, 2, 3}) {
      const TestContext ctx(threads);
      const PackedWeight pack = packed(*ctx, weight.ref());
      if (threads == 1) {  // every row alone
        for (std::int64_t t = 0; t < kRows; ++t) {
          ops::linear(*ctx, first.mat(kRows, out).rows(t, 1), x.mat(kRows, in).rows(t, 1), pack);
        }
      }
      for (std::int64_t rows = 1; rows <= kRows; ++rows) {
        Tensor y(rows * out);
        ops::linear(*ctx, y.mat(rows, out), x.mat(kRows, in).rows(0, rows), pack);
        ASSERT_TRUE(y.guards_intact());
        ASSERT_TRUE(same_bits(y.data(), first.data(), rows * out)) << rows << " of " << threads;
      }
    }
  }
}

TEST_P(LinearFormats, StridesAndAccumulate) {
  const TestContext ctx;
  const std::int64_t out = 37;
  const std::int64_t in = GetParam().round_up(290);
  const std::int64_t rows = 21;
  const RandomWeight weight(GetParam().format, out, in, 5);
  const PackedWeight pack = packed(*ctx, weight.ref());
  Tensor x = Tensor::normal(rows * in, 6);
  const Tensor start = Tensor::normal(rows * out, 7);
  std::vector<float> expected(start.begin(), start.end());
  const std::vector<float> w = ref::dequantize(weight.ref());
  ref::linear(expected.data(), x.data(), w.data(), rows, out, in, true);

  Tensor wide_x = Tensor::normal(rows * (in + 5), 8);
  Tensor wide_y = Tensor::filled(rows * (out + 9), 42.0F);
  const F32Mat xs = wide_x.mat(rows, in + 5).cols(2, in);
  const F32Mat ys = wide_y.mat(rows, out + 9).cols(3, out);
  for (std::int64_t t = 0; t < rows; ++t) {
    std::copy_n(x.data() + t * in, in, xs.row(t));
    std::copy_n(start.data() + t * out, out, ys.row(t));
  }
  ops::linear(*ctx, ys, xs, pack, true);
  EXPECT_TRUE(wide_y.guards_intact());
  for (std::int64_t t = 0; t < rows; ++t) {
    EXPECT_TRUE(same_bits(ys.row(t), expected.data() + t * out, out)) << t;
    for (std::int64_t i = 0; i < out + 9; ++i) {
      if (i < 3 || i >= out + 3) {
        ASSERT_EQ(wide_y[t * (out + 9) + i], 42.0F) << "wrote beside the view, row " << t;
      }
    }
  }
}

/// Runs the backend as on a machine with only `target`, while it lives.
class OnlyTarget {
 public:
  explicit OnlyTarget(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(target);
  }
  ~OnlyTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  OnlyTarget(const OnlyTarget&) = delete;
  OnlyTarget& operator=(const OnlyTarget&) = delete;
};

/// The instruction sets compiled in that this machine has.
std::vector<std::int64_t> targets() {
  std::vector<std::int64_t> result{HWY_SCALAR};
  for (const std::int64_t target : {HWY_AVX3, HWY_AVX2, HWY_NEON}) {
    if ((hwy::SupportedTargets() & target) != 0) {
      result.push_back(target);
    }
  }
  return result;
}

TEST_P(LinearFormats, SameBitsOnEveryInstructionSet) {
  const TestContext ctx;
  const std::int64_t out = 70;
  const std::int64_t in = GetParam().round_up(530);
  const RandomWeight weight(GetParam().format, out, in, 30);
  const std::vector<float> w = ref::dequantize(weight.ref());
  const PackedWeight pack = packed(*ctx, weight.ref());
  for (const std::int64_t rows : {1, 2, 4, 7, 16, 27}) {
    Tensor x = Tensor::normal(rows * in, 31);
    const std::vector<float> expected = chain(x, w, rows, out, in);
    for (const std::int64_t target : targets()) {
      const OnlyTarget only(target);
      Tensor y(rows * out);
      ops::linear(*ctx, y.mat(rows, out), x.mat(rows, in), pack);
      ASSERT_TRUE(same_bits(y.data(), expected.data(), rows * out))
          << hwy::TargetName(target) << ", " << rows << " rows";
    }
  }
}

TEST(WeightGrad, SameBitsOnEveryInstructionSet) {
  const TestContext ctx;
  const Tensor d_y = Tensor::normal(300 * 29, 32);
  const Tensor x = Tensor::normal(300 * 45, 33);
  std::vector<float> expected(29 * 45, 0.0F);
  ref::weight_grad(expected.data(), d_y.data(), x.data(), 300, 29, 45);
  for (const std::int64_t target : targets()) {
    const OnlyTarget only(target);
    Tensor d_w = Tensor::filled(29 * 45, 0.0F);
    ops::weight_grad(*ctx, d_w.mat(29, 45), Tensor(d_y).mat(300, 29), Tensor(x).mat(300, 45));
    ASSERT_TRUE(same_bits(d_w.data(), expected.data(), 29 * 45)) << hwy::TargetName(target);
  }
}

/// Equal to the chain on every target, NaN for NaN.
void expect_chain(const RandomWeight& weight, std::int64_t out, std::int64_t in, const Tensor& x) {
  const TestContext ctx;
  const std::int64_t rows = x.numel() / in;
  const std::vector<float> expected = chain(x, ref::dequantize(weight.ref()), rows, out, in);
  for (const std::int64_t target : targets()) {
    const OnlyTarget only(target);
    const PackedWeight pack = packed(*ctx, weight.ref());
    Tensor y(rows * out);
    ops::linear(*ctx, y.mat(rows, out), Tensor(x).mat(rows, in), pack);
    for (std::int64_t i = 0; i < rows * out; ++i) {
      if (std::isnan(expected[usize(i)])) {
        ASSERT_TRUE(std::isnan(y[i])) << hwy::TargetName(target) << " at " << i;
      } else {
        ASSERT_TRUE(same_bits(&y[i], &expected[usize(i)], 1))
            << hwy::TargetName(target) << " at " << i << ": " << y[i] << ' ' << expected[usize(i)];
      }
    }
  }
}

/// x with a 1 at one index of every row: each result is a single weight value.
Tensor unit_rows(std::int64_t in) {
  Tensor x = Tensor::filled(in * in, 0.0F);
  for (std::int64_t k = 0; k < in; ++k) {
    x[k * in + k] = 1.0F;
  }
  return x;
}

TEST(CodePoints, MxFp4AllCodesUnderAllScales) {
  // Row n: scale n in its one block, all codes twice. 255 is NaN, 0 a subnormal scale.
  RandomWeight weight(WeightFormat::kMxFp4, 256, 32, 40);
  for (std::size_t n = 0; n < 256; ++n) {
    weight.scale_codes()[n] = static_cast<std::uint8_t>(n);
    for (std::size_t b = 0; b < 16; ++b) {
      weight.codes()[n * 16 + b] = static_cast<std::uint8_t>((b % 8) * 2 + ((b % 8) * 2 + 1) * 16);
    }
  }
  expect_chain(weight, 256, 32, unit_rows(32));
  Tensor one = Tensor::filled(32, 1.0F);
  expect_chain(weight, 256, 32, one);
}

TEST(CodePoints, NvFp4AllScalesAndCodes) {
  RandomWeight weight(WeightFormat::kNvFp4, 256, 16, 41);
  for (std::size_t n = 0; n < 256; ++n) {
    weight.scale_codes()[n] = static_cast<std::uint8_t>(n);
    for (std::size_t b = 0; b < 8; ++b) {
      weight.codes()[n * 8 + b] = static_cast<std::uint8_t>(b * 2 + (b * 2 + 1) * 16);
    }
  }
  expect_chain(weight, 256, 16, unit_rows(16));
}

TEST(CodePoints, Fp8AllCodesNanScalesAndHugeScales) {
  // 300 rows and 260 columns: 3 x 3 blocks, the last ones ragged.
  for (const float scale : {1.0F, 0.0003F, 0x1p-140F, 127.0F, 300.0F, 3e38F}) {
    RandomWeight weight(WeightFormat::kFp8Block, 300, 260, 42);
    for (std::size_t i = 0; i < weight.codes().size(); ++i) {
      const auto code = static_cast<std::uint8_t>(i % 256);
      // NaN codes in one row only: they make its results NaN.
      const bool nan = (code & 0x7FU) == 0x7FU;
      weight.codes()[i] = nan && i / 260 != 17 ? std::uint8_t{1} : code;
    }
    for (float& value : weight.scale_values()) {
      value *= 100 * scale;
    }
    weight.scale_values()[4] = std::numeric_limits<float>::quiet_NaN();
    expect_chain(weight, 300, 260, Tensor::normal(5 * 260, 43));
  }
  RandomWeight one_block(WeightFormat::kFp8Block, 128, 8, 44);
  for (std::size_t i = 0; i < 1024; ++i) {
    one_block.codes()[i] = static_cast<std::uint8_t>(i % 127 + (i % 2) * 128);
  }
  expect_chain(one_block, 128, 8, unit_rows(8));
}

// MXFP4 at few rows runs its sums in units of the block scale; where that could round differently
// it must not be taken. Every case here under- or overflows somewhere.
TEST(CodePoints, MxFp4ExtremeScalesAndActivations) {
  for (const auto& [low, high] : {std::pair{0, 254}, {97, 137}, {120, 130}, {96, 137}, {97, 138}}) {
    RandomWeight weight(WeightFormat::kMxFp4, 40, 320, 45);
    Rng rng(46);
    for (std::uint8_t& code : weight.scale_codes()) {
      code = static_cast<std::uint8_t>(low + static_cast<int>(rng.below(usize(high - low + 1))));
    }
    for (const float size : {1.0F, 0x1p-39F, 0x1p-41F, 0x1p39F, 0x1p41F, 0x1p-126F, 0x1p120F}) {
      for (const std::int64_t rows : {1, 4, 9}) {
        Tensor x = Tensor::normal(rows * 320, 47);
        for (float& value : x) {
          value *= size;
        }
        x[3] = 0.0F;
        x[5] = -0.0F;
        expect_chain(weight, 40, 320, x);
        x[7] = std::numeric_limits<float>::infinity();
        x[8] = 0x1p-149F;
        expect_chain(weight, 40, 320, x);
      }
    }
  }
}

TEST(Linear, TransposedIsTheGradientOfTheInput) {
  const TestContext ctx;
  for (const WeightFormat format : {WeightFormat::kF32, WeightFormat::kBF16}) {
    for (const std::int64_t out : kSizes) {
      for (const std::int64_t in : {1, 16, 17, 33, 300}) {
        const RandomWeight weight(format, out, in, 9);
        const std::vector<float> w = transposed(ref::dequantize(weight.ref()), out, in);
        const PackedWeight pack = packed(*ctx, weight.ref(), Orientation::kTransposed);
        ASSERT_EQ(pack.out, in);
        ASSERT_EQ(pack.in, out);
        Tensor d_y = Tensor::normal(7 * out, 10);
        Tensor d_x(7 * in);
        ops::linear(*ctx, d_x.mat(7, in), d_y.mat(7, out), pack);
        ASSERT_TRUE(d_x.guards_intact());
        const std::vector<float> expected = chain(d_y, w, 7, in, out);
        ASSERT_TRUE(same_bits(d_x.data(), expected.data(), 7 * in)) << out << " x " << in;
      }
    }
  }
}

TEST(Linear, StridedWeightAndRepackingKeepsStorage) {
  const TestContext ctx;
  Tensor w = Tensor::normal(20 * 50, 11);
  const F32Mat view = w.mat(20, 50).cols(4, 33);
  std::vector<float> dense;
  for (std::int64_t n = 0; n < 20; ++n) {
    dense.insert(dense.end(), view.row(n), view.row(n) + 33);
  }
  PackedWeight pack;
  ops::pack(*ctx, pack, WeightRef::of(view), Orientation::kNormal);
  const std::byte* before = pack.data.data();
  Tensor x = Tensor::normal(3 * 33, 12);
  Tensor y(3 * 20);
  ops::linear(*ctx, y.mat(3, 20), x.mat(3, 33), pack);
  const std::vector<float> expected = chain(x, dense, 3, 20, 33);
  EXPECT_TRUE(same_bits(y.data(), expected.data(), 60));
  ops::pack(*ctx, pack, WeightRef::of(view), Orientation::kNormal);
  EXPECT_EQ(before, pack.data.data());
}

TEST(Linear, NoRowsIsNothing) {
  const TestContext ctx;
  const RandomWeight weight(WeightFormat::kF32, 20, 30, 13);
  const PackedWeight pack = packed(*ctx, weight.ref());
  Tensor x(0);
  Tensor y(0);
  ops::linear(*ctx, y.mat(0, 20), x.mat(0, 30), pack);
  EXPECT_TRUE(y.guards_intact());
}

TEST(Linear, ManyRowsAcrossAllBlockSizes) {
  const TestContext ctx;
  const std::int64_t rows = 333;
  const std::int64_t out = 700;
  const std::int64_t in = 777;
  const RandomWeight weight(WeightFormat::kF32, out, in, 14);
  const PackedWeight pack = packed(*ctx, weight.ref());
  Tensor x = Tensor::normal(rows * in, 15);
  Tensor y(rows * out);
  ops::linear(*ctx, y.mat(rows, out), x.mat(rows, in), pack);
  EXPECT_TRUE(y.guards_intact());
  const std::vector<float> expected = chain(x, ref::dequantize(weight.ref()), rows, out, in);
  EXPECT_TRUE(same_bits(y.data(), expected.data(), rows * out));
}

TEST(WeightGrad, IsTheChainBitForBit) {
  for (const int threads : {1, 2, 3}) {
    const TestContext ctx(threads);
    for (const std::int64_t n : {1, 12, 17, 33, 80}) {
      for (const std::int64_t k : {1, 16, 31, 80}) {
        for (const std::int64_t rows : {0, 1, 7, 256, 700}) {
          const Tensor d_y = Tensor::normal(rows * n, 17);
          const Tensor x = Tensor::normal(rows * k, 18);
          Tensor d_w = Tensor::normal(n * k, 19);
          std::vector<float> expected(d_w.begin(), d_w.end());
          ref::weight_grad(expected.data(), d_y.data(), x.data(), rows, n, k);
          ops::weight_grad(*ctx, d_w.mat(n, k), Tensor(d_y).mat(rows, n), Tensor(x).mat(rows, k));
          ASSERT_TRUE(d_w.guards_intact());
          ASSERT_TRUE(same_bits(d_w.data(), expected.data(), n * k))
              << n << " x " << k << ", " << rows << " rows";
        }
      }
    }
  }
}

TEST(WeightGrad, StridedViews) {
  const TestContext ctx;
  Tensor d_y = Tensor::normal(60 * 40, 20);
  Tensor x = Tensor::normal(60 * 50, 21);
  Tensor d_w = Tensor::filled(30 * 70, 2.0F);
  const F32Mat d_ys = d_y.mat(60, 40).cols(5, 30);
  const F32Mat xs = x.mat(60, 50).cols(1, 45);
  const F32Mat d_ws = d_w.mat(30, 70).cols(8, 45);
  ops::weight_grad(*ctx, d_ws, d_ys, xs);
  EXPECT_TRUE(d_w.guards_intact());
  for (std::int64_t n = 0; n < 30; ++n) {
    for (std::int64_t k = 0; k < 70; ++k) {
      float expected = 2.0F;
      for (std::int64_t t = 0; t < 60 && k >= 8 && k < 53; ++t) {
        expected = std::fma(d_ys(t, n), xs(t, k - 8), expected);
      }
      ASSERT_EQ(d_w[n * 70 + k], expected) << n << ' ' << k;
    }
  }
}

}  // namespace
}  // namespace tandem
