#include "ops/embed.h"

#include "ops/op_checks.h"
#include "ops/ref/embed_ref.h"
#include "tensor/dtype.h"

namespace tandem::test {
namespace {

constexpr std::int64_t kVocab = 50;

std::vector<std::int32_t> random_ids(std::int64_t count) {
  std::vector<std::int32_t> ids;
  Rng rng(mix_key({5, static_cast<std::uint64_t>(count)}));
  for (std::int64_t t = 0; t < count; ++t) {
    ids.push_back(checked_cast<std::int32_t>(rng.below(kVocab)));
  }
  return ids;
}

ConstI32Vec view(const std::vector<std::int32_t>& ids) {
  return {ids.data(), {isize(ids)}};
}

TEST(Embed, CopiesRowsExactly) {
  const PoisonedContext ctx;
  const std::vector<std::int32_t> ids = random_ids(23);
  for (const std::int64_t dim : kWidths) {
    for (const std::int64_t pad : {0, 5}) {
      Rows table = Rows::normal(kVocab, dim, 1, 1.0, pad);
      Rows y(23, dim, pad);
      ops::embed(*ctx, y.mat(), WeightRef::of(table.mat()), view(ids));
      for (std::int64_t t = 0; t < 23; ++t) {
        ASSERT_TRUE(same_bits(y.row(t), table.row(ids[usize(t)]), dim)) << dim << " row " << t;
      }
      EXPECT_TRUE(y.poison_intact());
    }
  }
}

TEST(Embed, WidensBf16Exactly) {
  const PoisonedContext ctx;
  const std::vector<std::int32_t> ids = random_ids(23);
  for (const std::int64_t dim : kWidths) {
    const std::int64_t stride = dim + 3;
    std::vector<BF16> table(usize(kVocab * stride));
    Rng rng(mix_key({9}));
    for (BF16& value : table) {
      value = BF16::from_float(static_cast<float>(rng.normal()));
    }
    WeightRef ref{WeightFormat::kBF16, kVocab, dim, stride, table.data(), nullptr, 1.0F};
    Rows y(23, dim, 2);
    ops::embed(*ctx, y.mat(), ref, view(ids));
    for (std::int64_t t = 0; t < 23; ++t) {
      for (std::int64_t i = 0; i < dim; ++i) {
        ASSERT_EQ(y.row(t)[i], table[usize(ids[usize(t)] * stride + i)].to_float());
      }
    }
    EXPECT_TRUE(y.poison_intact());
  }
}

TEST(Embed, BackwardAccumulatesRepeatedIds) {
  const PoisonedContext ctx;
  const std::int64_t rows = 200;  // every id about four times
  const std::vector<std::int32_t> ids = random_ids(rows);
  for (const std::int64_t dim : kWidths) {
    Rows d_y = Rows::normal(rows, dim, 2, 1.0, 3);
    Rows d_table = Rows::filled(kVocab, dim, 0.25F, 1);
    ops::embed_bwd(*ctx, d_table.mat(), d_y.mat(), view(ids));
    RefTensor d_y_ref(d_y.values<double>());
    RefTensor expected(std::vector<double>(usize(kVocab * dim), 0.25));
    ref::embed_bwd<double>(expected.mat(dim), d_y_ref.mat(dim), view(ids));
    RefTensor magnitude(std::vector<double>(usize(kVocab * dim), 0.25));
    RefTensor d_y_abs = d_y_ref.abs();
    ref::embed_bwd<double>(magnitude.mat(dim), d_y_abs.mat(dim), view(ids));
    std::vector<int> count(usize(kVocab));
    for (const std::int32_t id : ids) {
      ++count[usize(id)];
    }
    const double tolerance =
        sum_tolerance(*std::max_element(count.begin(), count.end()), max_abs(magnitude.values()));
    EXPECT_TRUE(close(d_table.values().data(), expected.values(), tolerance)) << dim;
    EXPECT_TRUE(d_table.poison_intact());
    // Planted bug: the last row of a repeated id wins instead of adding.
    RefTensor wrong(std::vector<double>(usize(kVocab * dim), 0.25));
    for (std::int64_t t = 0; t < rows; ++t) {
      for (std::int64_t i = 0; i < dim; ++i) {
        wrong.mat(dim)(ids[usize(t)], i) = d_y_ref.mat(dim)(t, i);
      }
    }
    EXPECT_FALSE(close(d_table.values().data(), wrong.values(), tolerance)) << dim;
  }
}

TEST(Embed, OracleGradientIsTheDerivative) {
  const std::vector<std::int32_t> ids{2, 0, 2, 1};
  RefTensor table = RefTensor::normal(3 * 5, 1);
  RefTensor d_y = RefTensor::normal(4 * 5, 2);
  RefTensor d_table = RefTensor::zeros(3 * 5);
  ref::embed_bwd<double>(d_table.mat(5), d_y.mat(5), view(ids));
  const auto loss = [&] {
    RefTensor y = RefTensor::zeros(4 * 5);
    ref::embed<double>(y.mat(5), table.mat(5), view(ids));
    return dot(y.values(), d_y.values());
  };
  expect_central_differences(loss, table, d_table, "d_table");
}

TEST(Embed, SameBitsForAnyThreadCount) {
  for (const std::int64_t rows : {0, 3000}) {
    const std::vector<std::int32_t> ids = random_ids(rows);
    expect_same_for_any_thread_count([&](const ExecCtx& ctx) {
      Rows table = Rows::normal(kVocab, 320, 1);
      Rows y(rows, 320);
      ops::embed(ctx, y.mat(), WeightRef::of(table.mat()), view(ids));
      ops::embed_bwd(ctx, table.mat(), y.mat(), view(ids));
      std::vector<float> all = y.values();
      append(all, table.values());
      return all;
    });
  }
}

}  // namespace
}  // namespace tandem::test
