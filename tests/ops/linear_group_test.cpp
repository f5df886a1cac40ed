// Several linear layers at once, sums of products and products by head: bit for bit what linear()
// gives one at a time.
#include <array>

#include <gtest/gtest.h>

#include "ops/act.h"
#include "ops/gemm.h"
#include "ops/ref/gemm_ref.h"
#include "support/op_test.h"
#include "support/weights.h"

namespace tandem {
namespace {

using test::Format;
using test::kFormats;
using test::packed;
using test::RandomWeight;
using test::same_bits;
using test::Tensor;
using test::TestContext;

TEST(LinearGroup, EqualsLinearPerCall) {
  struct Part {
    Format format;
    std::int64_t rows, out, in;
  };
  // Nine of one format, other formats between them, a call without rows, several input widths.
  std::vector<Part> parts;
  for (const Format& format : kFormats) {
    parts.push_back({format, 3, 40, format.round_up(90)});
    parts.push_back({kFormats[1], 3, 17, 90});
    parts.push_back({format, 8, 1, format.round_up(530)});
    parts.push_back({kFormats[1], 0, 20, 90});
    parts.push_back({kFormats[1], 9, 260, 90});
    parts.push_back({format, 30, 33, format.round_up(90)});
  }
  for (const int threads : {1, 3}) {
    const TestContext ctx(threads);
    Tensor x = Tensor::normal(30 * 600, 30);
    std::vector<PackedWeight> weights;
    std::vector<Tensor> expected;
    std::vector<Tensor> results;
    for (const Part& part : parts) {
      const RandomWeight weight(part.format.format, part.out, part.in, 31 + weights.size());
      weights.push_back(packed(*ctx, weight.ref()));
      expected.emplace_back(part.rows * part.out);
      results.emplace_back(part.rows * part.out);
    }
    std::vector<LinearCall> calls;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[i];
      const F32Mat xs = x.mat(30, 600).rows(0, part.rows).cols(2, part.in);
      ops::linear(*ctx, expected[i].mat(part.rows, part.out), xs, weights[i]);
      calls.push_back({results[i].mat(part.rows, part.out), xs, &weights[i]});
    }
    ops::linear_group(*ctx, calls);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      EXPECT_TRUE(results[i].guards_intact()) << i;
      EXPECT_TRUE(same_bits(results[i].data(), expected[i].data(), parts[i].rows * parts[i].out))
          << i;
    }
    ops::linear_group(*ctx, {});
  }
}

TEST(LinearGroup, AGatedCallIsTwoProductsAndSitu) {
  const TestContext ctx(2);
  for (const Format& format : kFormats) {
    for (const std::int64_t rows : {1, 3, 8, 11, 40}) {
      const std::int64_t in = format.round_up(600);
      constexpr std::int64_t kOut = 83;
      const RandomWeight gate(format.format, kOut, in, 41);
      const RandomWeight up(format.format, kOut, in, 42);
      const RandomWeight other(format.format, 30, in, 43);
      const PackedWeight packed_gate = packed(*ctx, gate.ref());
      const PackedWeight packed_up = packed(*ctx, up.ref());
      const PackedWeight packed_other = packed(*ctx, other.ref());
      Tensor result(rows * kOut);
      Tensor plain(rows * 30);
      const SituParams act{3.0F, 20.0F};
      Tensor x_data = Tensor::normal(rows * in, 44);
      const F32Mat xs = x_data.mat(rows, in);
      ops::linear_group(
          *ctx, std::array{LinearCall{plain.mat(rows, 30), xs, &packed_other},
                           LinearCall{result.mat(rows, kOut), xs, &packed_gate, &packed_up, act}});
      Tensor expected(rows * kOut);
      Tensor up_value(rows * kOut);
      Tensor expected_plain(rows * 30);
      ops::linear(*ctx, expected.mat(rows, kOut), xs, packed_gate);
      ops::linear(*ctx, up_value.mat(rows, kOut), xs, packed_up);
      ops::situ(*ctx, expected.mat(rows, kOut), expected.mat(rows, kOut), up_value.mat(rows, kOut),
                act);
      ops::linear(*ctx, expected_plain.mat(rows, 30), xs, packed_other);
      EXPECT_TRUE(same_bits(result.data(), expected.data(), rows * kOut)) << rows;
      EXPECT_TRUE(same_bits(plain.data(), expected_plain.data(), rows * 30)) << rows;
      EXPECT_TRUE(result.guards_intact() && plain.guards_intact());
    }
  }
}

TEST(LinearSum, AddsCompleteProductsFromLeftToRight) {
  const TestContext ctx(2);
  for (const Format& format : kFormats) {
    for (const std::int64_t rows : {1, 2, 8, 9, 40}) {
      for (const std::int64_t wide : {90, 3000}) {
        constexpr std::int64_t kOut = 53;
        const std::int64_t in[] = {format.round_up(wide), format.round_up(700)};
        const RandomWeight first(format.format, kOut, in[0], 51);
        const RandomWeight second(format.format, kOut, in[1], 52);
        const PackedWeight weights[] = {packed(*ctx, first.ref()), packed(*ctx, second.ref())};
        Tensor x[] = {Tensor::normal(rows * in[0], 53), Tensor::normal(rows * in[1], 54)};
        Tensor base = Tensor::normal(rows * kOut, 55);
        const F32Mat xs[] = {x[0].mat(rows, in[0]), x[1].mat(rows, in[1])};
        const std::array terms{LinearTerm{xs[0], &weights[0]}, LinearTerm{xs[1], &weights[1]}};
        Tensor products[] = {Tensor(rows * kOut), Tensor(rows * kOut)};
        for (std::size_t i = 0; i < 2; ++i) {
          ops::linear(*ctx, products[i].mat(rows, kOut), xs[i], weights[i]);
        }
        for (const std::size_t count : {1U, 2U}) {
          for (const bool with_base : {false, true}) {
            Tensor expected(rows * kOut);
            ops::copy(*ctx, expected.cube(rows, 1, kOut), products[0].cube(rows, 1, kOut));
            if (with_base) {
              ops::add(*ctx, expected.mat(rows, kOut), base.mat(rows, kOut),
                       products[0].mat(rows, kOut));
            }
            if (count == 2) {
              ops::add(*ctx, expected.mat(rows, kOut), expected.mat(rows, kOut),
                       products[1].mat(rows, kOut));
            }
            Tensor apart(rows * kOut);
            Tensor in_place(rows * kOut);
            ops::copy(*ctx, in_place.cube(rows, 1, kOut), base.cube(rows, 1, kOut));
            const ConstF32Mat none;
            ops::linear_sum(*ctx, apart.mat(rows, kOut),
                            with_base ? ConstF32Mat(base.mat(rows, kOut)) : none,
                            std::span(terms).first(count));
            ops::linear_sum(*ctx, in_place.mat(rows, kOut),
                            with_base ? ConstF32Mat(in_place.mat(rows, kOut)) : none,
                            std::span(terms).first(count));
            EXPECT_TRUE(same_bits(apart.data(), expected.data(), rows * kOut)) << rows << count;
            EXPECT_TRUE(same_bits(in_place.data(), expected.data(), rows * kOut)) << rows << count;
            EXPECT_TRUE(apart.guards_intact());
          }
        }
      }
    }
  }
}

TEST(LinearHeads, EqualsLinearPerHead) {
  for (const int threads : {1, 2}) {
    const TestContext ctx(threads);
    for (const std::int64_t rows : {1, 6, 50}) {
      constexpr std::int64_t kHeads = 3;
      constexpr std::int64_t kOut = 20;
      constexpr std::int64_t kIn = 35;
      std::vector<PackedWeight> weights;
      std::vector<std::vector<float>> values;
      for (std::uint64_t h = 0; h < 3; ++h) {
        const RandomWeight weight(WeightFormat::kF32, kOut, kIn, 20 + h);
        values.push_back(ref::dequantize(weight.ref()));
        weights.push_back(packed(*ctx, weight.ref()));
      }
      // Heads inside wider rows, as in a fused projection.
      Tensor x = Tensor::normal(rows * kHeads * (kIn + 3), 16);
      Tensor y = Tensor::filled(rows * kHeads * (kOut + 2), 1.5F);
      const F32Cube xs = x.cube(rows, kHeads, kIn + 3).cols(1, kIn);
      const F32Cube ys = y.cube(rows, kHeads, kOut + 2).cols(2, kOut);
      for (const bool accumulate : {false, true}) {
        const Tensor before = y;
        ops::linear_heads(*ctx, ys, xs, weights, accumulate);
        EXPECT_TRUE(y.guards_intact());
        for (std::int64_t t = 0; t < rows; ++t) {
          for (std::int64_t h = 0; h < kHeads; ++h) {
            const std::int64_t at = (t * kHeads + h) * (kOut + 2);
            std::vector<float> expected(before.data() + at + 2, before.data() + at + 2 + kOut);
            ref::linear(expected.data(), &xs(t, h, 0), values[usize(h)].data(), 1, kOut, kIn,
                        accumulate);
            ASSERT_TRUE(same_bits(&ys(t, h, 0), expected.data(), kOut)) << t << ' ' << h;
            ASSERT_EQ(y[at], 1.5F);
            ASSERT_EQ(y[at + 1], 1.5F);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem
