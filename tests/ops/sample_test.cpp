#include "ops/sample.h"

#include <limits>

#include "backends/cpu/families.h"
#include "ops/each_target.h"
#include "ops/op_checks.h"
#include "ops/op_table.h"
#include "ops/ref/sample_ref.h"

namespace tandem::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::uint64_t key_of(std::int64_t i) {
  return mix_key({17, static_cast<std::uint64_t>(i)});
}

std::int32_t sample_one(const ExecCtx& ctx, ConstF32Mat logits, SampleRow row) {
  std::int32_t id = -9;
  ops::sample(ctx, {&id, 1}, logits, {&row, 1});
  return id;
}

/// Draws `count` times from the one row of `logits`.
std::vector<std::int32_t> sample_many(const ExecCtx& ctx, Rows& logits, SamplingParams params,
                                      std::int64_t count) {
  const std::int64_t vocab = logits.mat().size(1);
  const ConstF32Mat repeated(logits.row(0), {count, vocab}, {0, 1});
  std::vector<SampleRow> rows;
  for (std::int64_t i = 0; i < count; ++i) {
    rows.push_back({params, key_of(i)});
  }
  std::vector<std::int32_t> ids(usize(count));
  ops::sample(ctx, ids, repeated, rows);
  return ids;
}

TEST(Sample, GreedyTakesTheLargestAndTheLowerIdOnTies) {
  const PoisonedContext ctx;
  for (const std::int64_t vocab : kWidths) {
    Rows logits = Rows::normal(1, vocab, 1);
    const float* const row = logits.row(0);
    const auto best = std::max_element(row, row + vocab) - row;
    EXPECT_EQ(sample_one(*ctx, logits.mat(), {{0.0F}, 1}), best) << vocab;
    logits.row(0)[vocab - 1] = 9.0F;
    logits.row(0)[vocab / 2] = 9.0F;
    EXPECT_EQ(sample_one(*ctx, logits.mat(), {{0.0F}, 1}), vocab / 2) << vocab;
  }
}

TEST(Sample, UnusableRowsGiveMinusOne) {
  const PoisonedContext ctx;
  for (const float temperature : {0.0F, 1.0F}) {
    for (const std::int64_t vocab : {1, 33}) {
      Rows logits = Rows::filled(1, vocab, -kInf);
      EXPECT_EQ(sample_one(*ctx, logits.mat(), {{temperature}, 1}), -1);
      logits = Rows::filled(1, vocab, kNan);
      EXPECT_EQ(sample_one(*ctx, logits.mat(), {{temperature}, 1}), -1);
      for (const float bad : {kNan, kInf}) {  // one bad logit among good ones is not hidden
        logits = Rows::filled(1, vocab, 0.5F);
        logits.row(0)[vocab - 1] = bad;
        EXPECT_EQ(sample_one(*ctx, logits.mat(), {{temperature}, 1}), -1);
      }
    }
  }
}

TEST(Sample, MaskedTokensAreNeverDrawn) {
  const PoisonedContext ctx;
  Rows logits = Rows::filled(1, 1200, -kInf);
  logits.row(0)[3] = 1.0F;
  logits.row(0)[700] = 1.0F;
  for (const SamplingParams params : {SamplingParams{}, SamplingParams{1.0F, 50, 0.99F, 0.0F},
                                      SamplingParams{2.0F, 0, 1, 0.1F}}) {
    for (const std::int32_t id : sample_many(*ctx, logits, params, 100)) {
      EXPECT_TRUE(id == 3 || id == 700) << id;
    }
  }
}

const SamplingParams kParams[] = {
    {1.0F, 0, 1.0F, 0.0F},  {0.7F, 0, 1.0F, 0.0F},    {1.3F, 5, 1.0F, 0.0F}, {1.0F, 0, 0.8F, 0.0F},
    {1.0F, 0, 1.0F, 0.05F}, {0.9F, 20, 0.9F, 0.02F},  {1.0F, 1, 1.0F, 0.0F}, {1.0F, 0, 0.0F, 0.0F},
    {1.0F, 0, 1.0F, 1.0F},  {1.0F, 1000, 0.5F, 0.0F},
};

TEST(Sample, DrawsTheOraclesIdForTheSameUniform) {
  const PoisonedContext ctx;
  for (const SamplingParams& params : kParams) {
    for (const std::int64_t vocab : {1, 7, 33, 320, 1500}) {
      SCOPED_TRACE(testing::Message()
                   << "V " << vocab << " T " << params.temperature << " k " << params.top_k << " p "
                   << params.top_p << " min " << params.min_p);
      Rows logits = Rows::normal(1, vocab, 3, 2.0);
      const std::vector<double> p =
          ref::sampling_distribution<double>(logits.values<double>(), params);
      const std::vector<std::int32_t> ids = sample_many(*ctx, logits, params, 200);
      int borderline = 0;
      for (std::int64_t i = 0; i < 200; ++i) {
        const double u = Rng(key_of(i)).uniform();
        // The weights carry an error of a few 1e-7 (z up to 20 in fp32): a uniform closer than
        // 1e-5 to a step of the CDF may fall on either side; the rest must agree exactly.
        const std::int32_t low = ref::inverse_cdf<double>(p, std::max(0.0, u - 1e-5));
        const std::int32_t high = ref::inverse_cdf<double>(p, u + 1e-5);
        EXPECT_TRUE(ids[usize(i)] >= low && ids[usize(i)] <= high)
            << ids[usize(i)] << " not in " << low << ".." << high;
        borderline += low != high ? 1 : 0;
        EXPECT_GT(p[usize(ids[usize(i)])], 0) << "a dropped token was drawn";
      }
      EXPECT_LT(borderline, 20);  // the check above must mean something: P(borderline) < V * 2e-5
    }
  }
}

/// Vocabularies of many stretches of sums. A draw near a step of the CDF depends on the order of
/// the sums, which is the CPU's on every backend (top_p's is not): the ids must be its ids.
TEST(Sample, WideRowsDrawTheOraclesId) {
  const PoisonedContext ctx;
  constexpr std::int64_t kDraws = 40;
  for (const std::int64_t vocab : {1, 7, 2048, 32768, 163840}) {
    for (const SamplingParams& params : {kParams[0], kParams[1], kParams[2], kParams[4]}) {
      SCOPED_TRACE(testing::Message() << "V " << vocab << " T " << params.temperature << " k "
                                      << params.top_k << " min " << params.min_p);
      Rows logits = Rows::normal(1, vocab, 3, 2.0);
      const std::vector<double> p =
          ref::sampling_distribution<double>(logits.values<double>(), params);
      const std::vector<std::int32_t> ids = sample_many(*ctx, logits, params, kDraws);
      for (std::int64_t i = 0; i < kDraws; ++i) {
        const std::int32_t id = ids[usize(i)];
        const double u = Rng(key_of(i)).uniform();
        EXPECT_GE(id, ref::inverse_cdf<double>(p, std::max(0.0, u - 1e-5)));
        EXPECT_LE(id, ref::inverse_cdf<double>(p, u + 1e-5));
        EXPECT_GT(p[usize(id)], 0) << "a dropped token was drawn";
        std::int32_t cpu_id = -9;
        const SampleRow row{params, key_of(i)};
        cpu_sample_ops().sample(*ctx, {&cpu_id, 1}, logits.mat(), {&row, 1});
        EXPECT_EQ(id, cpu_id);
      }
    }
  }
}

TEST(Sample, FrequenciesFollowTheDistribution) {
  const PoisonedContext ctx;
  constexpr std::int64_t kDraws = 20000;
  const SamplingParams params{0.8F, 6, 0.95F, 0.0F};
  Rows logits = Rows::normal(1, 12, 4);
  const std::vector<double> p = ref::sampling_distribution<double>(logits.values<double>(), params);
  std::vector<double> counts(12, 0.0);
  for (const std::int32_t id : sample_many(*ctx, logits, params, kDraws)) {
    counts[usize(id)] += 1.0;
  }
  // Chi-square with at most 5 degrees of freedom exceeds 25 with probability 1e-4; keys are fixed.
  const auto chi_square = [&](const std::vector<double>& q) {
    double sum = 0;
    for (std::size_t i = 0; i < q.size(); ++i) {
      const double mean = q[i] * kDraws;
      sum += mean > 0 ? (counts[i] - mean) * (counts[i] - mean) / mean : counts[i];
    }
    return sum;
  };
  EXPECT_LT(chi_square(p), 25.0);
  // Planted bug: the temperature forgotten.
  EXPECT_GT(chi_square(ref::sampling_distribution<double>(logits.values<double>(),
                                                          {1.0F, 6, 0.95F, 0.0F})),
            25.0);
}

TEST(Sample, TopKBreaksTiesByLowerId) {
  const PoisonedContext ctx;
  Rows logits = Rows::filled(1, 600, 0.5F);
  logits.row(0)[599] = 1.0F;
  for (const std::int32_t id : sample_many(*ctx, logits, {1.0F, 3, 1.0F, 0.0F}, 100)) {
    EXPECT_TRUE(id == 599 || id == 0 || id == 1) << id;
  }
}

TEST(Sample, TopPKeepsTheSmallestSetThatReachesTheMass) {
  const PoisonedContext ctx;
  Rows logits = Rows::filled(1, 4, 0.0F);  // four tokens of 1/4: exact
  const auto largest = [&](float top_p) {
    const std::vector<std::int32_t> ids = sample_many(*ctx, logits, {1.0F, 0, top_p, 0.0F}, 200);
    return *std::max_element(ids.begin(), ids.end());
  };
  EXPECT_EQ(largest(0.25F), 0);
  EXPECT_EQ(largest(0.26F), 1);
  EXPECT_EQ(largest(0.5F), 1);
  EXPECT_EQ(largest(0.75F), 2);
  EXPECT_EQ(largest(0.76F), 3);
  // After top_k = 2 the mass is taken of what is left: 0.5 keeps one of two.
  for (const std::int32_t id : sample_many(*ctx, logits, {1.0F, 2, 0.5F, 0.0F}, 50)) {
    EXPECT_EQ(id, 0);
  }
}

TEST(Sample, TopPOnFlatAndOnVeryPeakedRows) {
  const PoisonedContext ctx;
  const SamplingParams params{1.0F, 0, 0.9F, 0.0F};
  // Nearly flat: about 4,400 tokens are kept. Peaked: one token, the rest far below e^-32.
  for (const double scale : {0.0, 0.01, 0.3, 100.0}) {
    Rows logits = Rows::normal(1, 5000, 3, scale);
    const std::vector<double> p =
        ref::sampling_distribution<double>(logits.values<double>(), params);
    for (const std::int32_t id : sample_many(*ctx, logits, params, 300)) {
      EXPECT_GT(p[usize(id)], 0) << id << " scale " << scale;
    }
  }
}

TEST(Sample, ARowsDrawDependsOnItsKeyOnly) {
  const std::int64_t vocab = 700;
  Rows logits = Rows::normal(60, vocab, 1, 2.0, 3);
  std::vector<SampleRow> rows;
  for (std::int64_t t = 0; t < 60; ++t) {
    rows.push_back({kParams[t % 10], key_of(t)});
  }
  std::vector<std::int32_t> expected;
  for (const int threads : {1, 2, 3}) {
    const PoisonedContext ctx(threads);
    std::vector<std::int32_t> ids(60);
    ops::sample(*ctx, ids, logits.mat(), rows);
    if (threads == 1) {
      expected = ids;
    }
    EXPECT_EQ(ids, expected) << threads << " threads";
    for (const std::int64_t t : {0, 31, 59}) {
      EXPECT_EQ(sample_one(*ctx, logits.mat().rows(t, 1), rows[usize(t)]), expected[usize(t)]);
    }
    ops::sample(*ctx, {}, {}, {});
  }
}

TEST(Sample, EveryInstructionSetDrawsFromTheDistribution) {
  const PoisonedContext ctx;
  const SamplingParams params{0.9F, 20, 0.9F, 0.02F};
  Rows logits = Rows::normal(1, 333, 3, 2.0);
  const std::vector<double> p = ref::sampling_distribution<double>(logits.values<double>(), params);
  for_each_simd_target([&](const char* target) {
    for (std::int64_t i = 0; i < 50; ++i) {
      std::int32_t id = -9;
      const SampleRow row{params, key_of(i)};
      cpu_sample_ops().sample(*ctx, {&id, 1}, logits.mat(), {&row, 1});
      const double u = Rng(row.key).uniform();
      EXPECT_GE(id, ref::inverse_cdf<double>(p, std::max(0.0, u - 1e-5))) << target;
      EXPECT_LE(id, ref::inverse_cdf<double>(p, u + 1e-5)) << target;
      const SampleRow greedy{{0.0F}, key_of(i)};
      cpu_sample_ops().sample(*ctx, {&id, 1}, logits.mat(), {&greedy, 1});
      EXPECT_EQ(id, std::max_element(logits.row(0), logits.row(0) + 333) - logits.row(0)) << target;
    }
  });
}

}  // namespace
}  // namespace tandem::test
