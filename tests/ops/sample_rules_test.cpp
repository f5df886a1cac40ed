// sample_rules_test.cpp — rules on logits and the most likely tokens against the oracle, and the
// draws under them against the exact distribution.
#include <limits>

#include "ops/op_checks.h"
#include "ops/ref/sample_ref.h"
#include "ops/sample.h"

namespace tandem::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Owns what LogitChanges looks at.
class Changes {
 public:
  explicit Changes(std::int64_t vocab) : vocab_(vocab) {}

  /// The next lists and masks belong to this row.
  Changes& row(std::int32_t row, float repetition = 1, float frequency = 0, float presence = 0) {
    const auto seen = static_cast<std::int32_t>(seen_.size());
    const auto bias = static_cast<std::int32_t>(biases_.size());
    rows_.push_back({row, repetition, frequency, presence, seen, seen, bias, bias, -1});
    return *this;
  }
  Changes& seen(std::int32_t token, std::int32_t num_in_response) {
    seen_.push_back({token, num_in_response});
    rows_.back().seen_end += 1;
    return *this;
  }
  Changes& bias(std::int32_t token, float bias) {
    biases_.push_back({token, bias});
    rows_.back().bias_end += 1;
    return *this;
  }
  template <typename Allows>
  Changes& mask(const Allows& allows) {
    rows_.back().mask = static_cast<std::int32_t>(num_masks());
    masks_.resize(masks_.size() + usize(words()), 0);
    for (std::int64_t v = 0; v < vocab_; ++v) {
      masks_[masks_.size() - usize(words()) + usize(v / 32)] |=
          (allows(v) ? std::uint32_t{1} : std::uint32_t{0}) << (v % 32);
    }
    return *this;
  }
  /// A row with everything, from a seed.
  Changes& random_row(std::int32_t row, std::uint64_t seed) {
    Rng rng(mix_key({seed, 0x5EED}));
    this->row(row, static_cast<float>(0.5 + rng.uniform()), static_cast<float>(rng.normal()),
              static_cast<float>(rng.normal()));
    for (std::int32_t v = 0; v < vocab_; ++v) {
      if (rng.below(4) == 0) {
        seen(v, static_cast<std::int32_t>(rng.below(5)));
      }
      if (rng.below(8) == 0) {
        bias(v, static_cast<float>(20 * rng.normal()));
      }
    }
    if (rng.below(3) != 0) {
      mask([&](std::int64_t) { return rng.below(3) != 0; });
    }
    return *this;
  }

  [[nodiscard]] LogitChanges views() const {
    return {rows_, seen_, biases_, {masks_.data(), {num_masks(), words()}}};
  }

 private:
  [[nodiscard]] std::int64_t words() const { return (vocab_ + 31) / 32; }
  [[nodiscard]] std::int64_t num_masks() const { return isize(masks_) / words(); }

  std::int64_t vocab_;
  std::vector<LogitRow> rows_;
  std::vector<SeenToken> seen_;
  std::vector<LogitBias> biases_;
  std::vector<std::uint32_t> masks_;
};

TEST(AdjustLogits, HasTheOraclesBits) {
  const PoisonedContext ctx;
  for (const std::int64_t vocab : {1, 7, 31, 32, 33, 320, 5000}) {
    for (const std::int64_t pad : {0, 5}) {
      SCOPED_TRACE(testing::Message() << "V " << vocab << " pad " << pad);
      constexpr std::int64_t kRows = 12;
      Rows logits = Rows::normal(kRows, vocab, 5, 4.0, pad);
      Rows expected = logits;
      Changes changes(vocab);
      for (const std::int32_t row : {7, 0, 3, 11}) {  // in any order, others stay
        changes.random_row(row, static_cast<std::uint64_t>(row + vocab));
      }
      ref::adjust_logits<float>(expected.mat(), changes.views());
      ops::adjust_logits(*ctx, logits.mat(), changes.views());
      for (std::int64_t t = 0; t < kRows; ++t) {
        EXPECT_TRUE(same_bits(logits.row(t), expected.row(t), vocab)) << "row " << t;
      }
      EXPECT_TRUE(logits.poison_intact());
    }
  }
}

TEST(AdjustLogits, AppliesEachRuleInItsPlace) {
  const PoisonedContext ctx;
  Rows logits = Rows::filled(1, 8, 0.0F);
  const float before[] = {3.0F, -3.0F, 3.0F, 3.0F, -3.0F, 1.0F, 2.0F, 0.0F};
  std::copy_n(before, 8, logits.row(0));
  Changes changes(8);
  changes.row(0, 1.5F, 0.25F, 0.5F)
      .seen(0, 0)  // of the prompt: the repetition penalty only
      .seen(1, 0)
      .seen(2, 1)
      .seen(4, 3)
      .seen(6, 2)
      .bias(5, -1.5F)
      .bias(2, 10.0F)  // after its penalties
      .bias(6, 100.0F)
      .mask([](std::int64_t v) { return v != 6; });  // last: no bias brings it back
  ops::adjust_logits(*ctx, logits.mat(), changes.views());
  const float after[] = {2.0F,  -4.5F, 2.0F - 0.75F + 10.0F, 3.0F, -4.5F - 1.25F, -0.5F,
                         -kInf, 0.0F};
  for (int v = 0; v < 8; ++v) {
    EXPECT_EQ(logits.row(0)[v], after[v]) << v;
  }
}

TEST(AdjustLogits, AMaskHidesNothingThatIsNotFinite) {
  const PoisonedContext ctx;
  for (const float bad : {kNan, kInf}) {
    Rows logits = Rows::filled(1, 40, 1.0F);
    logits.row(0)[35] = bad;
    Changes changes(40);
    changes.row(0).mask([](std::int64_t v) { return v == 2; });
    ops::adjust_logits(*ctx, logits.mat(), changes.views());
    std::int32_t id = -9;
    const SampleRow row{{}, 3};
    ops::sample(*ctx, {&id, 1}, logits.mat(), {&row, 1});
    EXPECT_EQ(id, -1);
  }
}

TEST(AdjustLogits, NothingToChangeChangesNothing) {
  const PoisonedContext ctx;
  Rows logits = Rows::normal(3, 50, 1);
  const std::vector<float> before = logits.values();
  ops::adjust_logits(*ctx, logits.mat(), {});
  Changes changes(50);
  changes.row(1).row(2).mask([](std::int64_t) { return true; });
  ops::adjust_logits(*ctx, logits.mat(), changes.views());
  EXPECT_EQ(logits.values(), before);
}

TEST(AdjustLogits, SameForAnyThreadCount) {
  expect_same_for_any_thread_count([](const ExecCtx& ctx) {
    constexpr std::int64_t kVocab = 40000;  // several blocks of rows
    Rows logits = Rows::normal(6, kVocab, 2);
    Changes changes(kVocab);
    for (std::int32_t row = 0; row < 6; ++row) {
      changes.random_row(row, static_cast<std::uint64_t>(row));
    }
    ops::adjust_logits(ctx, logits.mat(), changes.views());
    return logits.values();
  });
}

/// Ids [T, K] of top_tokens.
std::vector<std::int32_t> top_of(const ExecCtx& ctx, ConstF32Mat logits, std::int64_t k) {
  std::vector<std::int32_t> ids(usize(logits.size(0) * k), -9);
  ops::top_tokens(ctx, {ids.data(), {logits.size(0), k}}, logits);
  return ids;
}

TEST(TopTokens, AreTheFirstOfTheRanking) {
  const PoisonedContext ctx;
  for (const std::int64_t vocab : {1, 7, 33, 600, 5000}) {
    Rows logits = Rows::normal(9, vocab, 8, 2.0, 3);
    for (std::int64_t t = 0; t < 9; ++t) {  // ties, NaN and -inf among them
      logits.row(t)[vocab / 2] = logits.row(t)[0];
      logits.row(t)[vocab - 1] = t % 3 == 0 ? kNan : t % 3 == 1 ? -kInf : kInf;
    }
    for (const std::int64_t k : {0, 1, 5, 20}) {
      const std::int64_t count = std::min(k, vocab);
      const std::vector<std::int32_t> ids = top_of(*ctx, logits.mat(), count);
      for (std::int64_t t = 0; t < 9; ++t) {
        std::vector<std::int32_t> expected =
            ref::ranking<float>({logits.row(t), logits.row(t) + vocab});
        expected.resize(usize(count));
        EXPECT_EQ(std::vector<std::int32_t>(ids.begin() + t * count, ids.begin() + (t + 1) * count),
                  expected)
            << "V " << vocab << " k " << k << " row " << t;
      }
    }
  }
}

TEST(TopTokens, TiesGoToTheLowerId) {
  const PoisonedContext ctx;
  Rows logits = Rows::filled(1, 700, 0.25F);
  logits.row(0)[650] = 1.0F;
  logits.row(0)[9] = -0.0F;
  EXPECT_EQ(top_of(*ctx, logits.mat(), 4), (std::vector<std::int32_t>{650, 0, 1, 2}));
  logits = Rows::filled(1, 3, -kInf);
  EXPECT_EQ(top_of(*ctx, logits.mat(), 3), (std::vector<std::int32_t>{0, 1, 2}));
  logits = Rows::filled(1, 3, kNan);
  EXPECT_EQ(top_of(*ctx, logits.mat(), 3), (std::vector<std::int32_t>{0, 1, 2}));
}

/// At least `count` draws under `changes` of a row, in batches in which every other row has a rule
/// of its own.
std::vector<double> frequencies(const ExecCtx& ctx, const Rows& logits, const Changes& changes,
                                const SamplingParams& params, std::int64_t batch,
                                std::int64_t count) {
  const std::int64_t vocab = isize(logits.values());
  std::vector<double> counts(usize(vocab), 0.0);
  std::vector<std::int32_t> ids(usize(batch));
  std::vector<SampleRow> rows(usize(batch));
  std::int64_t drawn = 0;
  for (std::uint64_t round = 0; drawn < count; ++round) {
    Rows all(batch, vocab);
    Changes others(vocab);
    LogitChanges views = changes.views();
    std::vector<LogitRow> tested;
    for (std::int32_t t = 0; t < batch; ++t) {
      std::copy_n(logits.row(0), vocab, all.row(t));
      rows[usize(t)] = {params, mix_key({21, round, static_cast<std::uint64_t>(t)})};
      if (batch == 1 || usize(t) % 2 == round % 2) {
        tested.push_back(views.rows[0]);
        tested.back().row = t;
      } else {
        others.row(t).bias(t % static_cast<std::int32_t>(vocab), 50.0F);
      }
    }
    views.rows = tested;
    ops::adjust_logits(ctx, all.mat(), others.views());
    ops::adjust_logits(ctx, all.mat(), views);
    ops::sample(ctx, ids, all.mat(), rows);
    for (const LogitRow& row : tested) {
      counts[usize(ids[usize(row.row)])] += 1.0;
      ++drawn;
    }
  }
  return counts;
}

/// With `p` of at most 16 tokens: 15 degrees of freedom exceed 45 with probability 1e-4.
double chi_square(const std::vector<double>& counts, const std::vector<double>& p) {
  double total = 0;
  for (const double count : counts) {
    total += count;
  }
  double sum = 0;
  for (std::size_t v = 0; v < p.size(); ++v) {
    const double mean = p[v] * total;
    sum += mean > 0 ? (counts[v] - mean) * (counts[v] - mean) / mean : 1e9 * counts[v];
  }
  return sum;
}

TEST(AdjustLogits, DrawsUnderRulesFollowTheExactDistribution) {
  const PoisonedContext ctx;
  constexpr std::int64_t kVocab = 16;
  const Rows logits = Rows::normal(1, kVocab, 4);
  const auto even_or_low = [](std::int64_t v) { return v % 2 == 0 || v < 6; };
  Changes penalties(kVocab);
  penalties.row(0, 1.4F, 0.3F, 0.4F).seen(1, 2).seen(4, 1).seen(9, 0).seen(12, 5);
  Changes biased(kVocab);
  biased.row(0).bias(3, 1.5F).bias(8, -2.0F);
  Changes masked(kVocab);
  masked.row(0).mask(even_or_low);
  Changes all(kVocab);
  all.row(0, 0.8F, -0.2F, 0.5F).seen(0, 1).seen(2, 0).bias(2, 0.7F).bias(7, 5.0F).mask(even_or_low);
  for (const Changes* changes : {&penalties, &biased, &masked, &all}) {
    std::vector<double> exact(usize(kVocab));
    std::copy_n(logits.row(0), kVocab, exact.begin());
    ref::adjust_logits<double>({exact.data(), {1, kVocab}}, changes->views());
    for (const SamplingParams& params : {SamplingParams{}, SamplingParams{0.7F, 0, 0.9F, 0.0F},
                                         SamplingParams{1.5F, 7, 1, 0.05F}}) {
      const std::vector<double> p = ref::sampling_distribution<double>(exact, params);
      for (const std::int64_t batch : {1, 3, 16, 64}) {
        const std::vector<double> counts = frequencies(*ctx, logits, *changes, params, batch, 3000);
        EXPECT_LT(chi_square(counts, p), 45.0) << "T " << params.temperature << " batch " << batch;
        // Planted bug: the rules forgotten.
        EXPECT_GT(
            chi_square(counts, ref::sampling_distribution<double>(logits.values<double>(), params)),
            45.0);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test
