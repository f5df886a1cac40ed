#include "ops/loss.h"

#include <limits>

#include "backends/cpu/families.h"
#include "ops/each_target.h"
#include "ops/op_checks.h"
#include "ops/op_table.h"
#include "ops/ref/loss_ref.h"

namespace tandem::test {
namespace {

constexpr std::int64_t kVocabs[] = {1,   7,    15,   16,   17,    33,    128,
                                    320, 1024, 2048, 3000, 32768, 163840};
constexpr float kInf = std::numeric_limits<float>::infinity();

/// Targets (one row in five is skipped) and temperatures for `rows` rows.
struct Choice {
  std::vector<std::int32_t> targets;
  std::vector<float> temperature;
  RefTensor temperature_ref{{}};

  Choice(std::int64_t rows, std::int64_t vocab) {
    Rng rng(mix_key({static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(vocab)}));
    constexpr float kTemperatures[] = {1.0F, 0.7F, 1.0F, 2.5F};
    for (std::int64_t t = 0; t < rows; ++t) {
      const auto id = checked_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(vocab)));
      targets.push_back(t % 5 == 4 ? -1 : id);
      temperature.push_back(kTemperatures[t % 4]);
      temperature_ref.values().push_back(static_cast<double>(temperature.back()));
    }
  }
  [[nodiscard]] ConstI32Vec ids() const { return {targets.data(), {isize(targets)}}; }
  [[nodiscard]] ConstF32Vec temp() const { return {temperature.data(), {isize(temperature)}}; }
};

/// S is a sum of fp32 chunks of 1024 (64 roundings a lane at the widest vector, 512 on the scalar
/// target) in double: `terms` 512 at most; z carries 2 roundings of its size, the subtraction of
/// ln S one more.
double tolerance(std::int64_t vocab, double largest_z) {
  const double log_v = std::log(static_cast<double>(vocab));
  return sum_tolerance(std::min<std::int64_t>(vocab, 512), 1.0) +
         sum_tolerance(4, largest_z + log_v);
}

double largest_z(const Rows& logits, double min_temperature) {
  return 2 * max_abs(logits.values()) / min_temperature;
}

TEST(LogProb, HandNumbers) {
  const PoisonedContext ctx;
  const float logits[] = {2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0};
  const std::int32_t targets[] = {0, 1, 2, 0, 1, 2};
  const float temperature[] = {1, 1, 1, 0.5F, 0.5F, 0.5F};
  float logprob[6];
  float entropy[6];
  ops::log_prob(*ctx, {logprob, {6}}, {entropy, {6}}, {logits, {6, 3}}, {targets, {6}},
                {temperature, {6}});
  const std::vector<double> e_logprob{-0.4076060, -1.4076060, -2.4076060,
                                      -0.1429316, -2.1429316, -4.1429316};
  const std::vector<double> e_entropy{0.8323956, 0.8323956, 0.8323956,
                                      0.4410574, 0.4410574, 0.4410574};
  EXPECT_TRUE(close(logprob, e_logprob, tolerance(3, 4.0)));
  EXPECT_TRUE(close(entropy, e_entropy, tolerance(3, 4.0)));
}

TEST(LogProb, MatchesTheOracle) {
  const PoisonedContext ctx;
  const std::int64_t rows = 9;
  for (const std::int64_t vocab : kVocabs) {
    for (const double scale : {1.0, 20.0}) {
      SCOPED_TRACE(testing::Message() << "V " << vocab << " scale " << scale);
      Rows logits = Rows::normal(rows, vocab, 1, scale, 3);
      const Choice choice(rows, vocab);
      Tensor logprob(rows);
      Tensor entropy(rows);
      ops::log_prob(*ctx, logprob.vec(), entropy.vec(), logits.mat(), choice.ids(), choice.temp());
      RefTensor logits_ref(logits.values<double>());
      RefTensor e_logprob = RefTensor::zeros(rows);
      RefTensor e_entropy = RefTensor::zeros(rows);
      RefTensor temperature = choice.temperature_ref;
      ref::log_prob<double>(e_logprob.vec(), e_entropy.vec(), logits_ref.mat(vocab), choice.ids(),
                            temperature.vec());
      const double bound = tolerance(vocab, largest_z(logits, 0.7));
      EXPECT_TRUE(close(logprob.data(), e_logprob.values(), bound));
      // H = ln S - B / S: B's terms sum to at most (H + ln S) S.
      const double log_v = std::log(static_cast<double>(vocab));
      EXPECT_TRUE(close(entropy.data(), e_entropy.values(), bound * (1 + 2 * log_v)));
      EXPECT_TRUE(logprob.guards_intact() && entropy.guards_intact());
      // Without the entropy: the same log-probs.
      Tensor only(rows);
      ops::log_prob(*ctx, only.vec(), {}, logits.mat(), choice.ids(), choice.temp());
      EXPECT_TRUE(same_bits(only.data(), logprob.data(), rows));
      if (vocab > 1) {  // planted bug: the temperature forgotten
        RefTensor ones(std::vector<double>(usize(rows), 1.0));
        ref::log_prob<double>(e_logprob.vec(), e_entropy.vec(), logits_ref.mat(vocab), choice.ids(),
                              ones.vec());
        EXPECT_FALSE(close(logprob.data(), e_logprob.values(), bound));
      }
    }
  }
}

TEST(LogProb, ExtremeLogits) {
  const PoisonedContext ctx;
  // Masked tokens, one certain token, and values whose exponentials overflow without the maximum.
  const float logits[] = {-kInf, 3, -kInf, 1, 5, -kInf, -kInf, -kInf, 3e4F, 3e4F, -3e4F, 0};
  const std::int32_t targets[] = {1, 0, 1};
  const float temperature[] = {1, 1, 1};
  float logprob[3];
  float entropy[3];
  ops::log_prob(*ctx, {logprob, {3}}, {entropy, {3}}, {logits, {3, 4}}, {targets, {3}},
                {temperature, {3}});
  const double p = 1 / (1 + std::exp(-2.0));
  const double h = -p * std::log(p) - (1 - p) * std::log(1 - p);
  EXPECT_TRUE(close(logprob, std::vector<double>{std::log(p), 0, -std::log(2.0)}, tolerance(4, 2)));
  EXPECT_TRUE(close(entropy, std::vector<double>{h, 0, std::log(2.0)}, tolerance(4, 2)));
  float d_logits[12];
  const float ones[] = {1, 1, 1};
  ops::log_prob_bwd(*ctx, {d_logits, {3, 4}}, {ones, {3}}, {ones, {3}}, {logits, {3, 4}},
                    {targets, {3}}, {temperature, {3}});
  for (const float d : d_logits) {
    EXPECT_TRUE(std::isfinite(d));
  }
  EXPECT_EQ(d_logits[0], 0.0F);  // a masked token has no gradient
}

TEST(LogProb, NaNIsNotHidden) {
  const PoisonedContext ctx;
  Rows logits = Rows::normal(1, 40, 1);
  logits.row(0)[17] = std::numeric_limits<float>::quiet_NaN();
  const std::int32_t target = 3;
  const float temperature = 1;
  float logprob = 0;
  float entropy = 0;
  ops::log_prob(*ctx, {&logprob, {1}}, {&entropy, {1}}, logits.mat(), {&target, {1}},
                {&temperature, {1}});
  EXPECT_TRUE(std::isnan(logprob));
  EXPECT_TRUE(std::isnan(entropy));
}

TEST(LogProb, BackwardMatchesTheOracleInPlaceToo) {
  const PoisonedContext ctx;
  const std::int64_t rows = 9;
  for (const std::int64_t vocab : kVocabs) {
    SCOPED_TRACE(vocab);
    Rows logits = Rows::normal(rows, vocab, 1, 2.0, 3);
    const Choice choice(rows, vocab);
    Tensor d_logprob = Tensor::normal(rows, 2);
    Tensor d_entropy = Tensor::normal(rows, 3);
    Rows d_logits(rows, vocab, 1);
    ops::log_prob_bwd(*ctx, d_logits.mat(), d_logprob.vec(), d_entropy.vec(), logits.mat(),
                      choice.ids(), choice.temp());
    RefTensor logits_ref(logits.values<double>());
    RefTensor temperature = choice.temperature_ref;
    RefTensor d_logprob_ref(d_logprob.as_double());
    RefTensor d_entropy_ref(d_entropy.as_double());
    RefTensor expected = RefTensor::zeros(rows * vocab);
    ref::log_prob_bwd<double>(expected.mat(vocab), d_logprob_ref.vec(), d_entropy_ref.vec(),
                              logits_ref.mat(vocab), choice.ids(), temperature.vec());
    // |d_logprob (hit - p)| <= |d_logprob|; p |ln p| <= 1/e, p H <= ln V; the softmax's relative
    // error is the log-prob's absolute one. T >= 0.7.
    const double log_v = std::log(static_cast<double>(vocab));
    const double size =
        max_abs(d_logprob.as_double()) + (0.4 + log_v) * max_abs(d_entropy.as_double());
    const double bound =
        (tolerance(vocab, largest_z(logits, 0.7)) * (1 + 2 * log_v) + sum_tolerance(8, 1.0)) *
        size / 0.7;
    EXPECT_TRUE(close(d_logits.values().data(), expected.values(), bound));
    EXPECT_TRUE(d_logits.poison_intact());
    if (vocab > 1) {  // planted bug: no entropy term
      RefTensor zero = RefTensor::zeros(rows);
      ref::log_prob_bwd<double>(expected.mat(vocab), d_logprob_ref.vec(), zero.vec(),
                                logits_ref.mat(vocab), choice.ids(), temperature.vec());
      EXPECT_FALSE(close(d_logits.values().data(), expected.values(), bound));
      Rows plain(rows, vocab);
      ops::log_prob_bwd(*ctx, plain.mat(), d_logprob.vec(), {}, logits.mat(), choice.ids(),
                        choice.temp());
      EXPECT_TRUE(close(plain.values().data(), expected.values(), bound));
    }
    ops::log_prob_bwd(*ctx, logits.mat(), d_logprob.vec(), d_entropy.vec(), logits.mat(),
                      choice.ids(), choice.temp());
    EXPECT_EQ(logits.values(), d_logits.values());
  }
}

TEST(LogProb, OracleGradientIsTheDerivative) {
  const std::int64_t rows = 4;
  const std::int64_t vocab = 6;
  RefTensor logits = RefTensor::normal(rows * vocab, 1, 1.5);
  RefTensor d_logprob = RefTensor::normal(rows, 2);
  RefTensor d_entropy = RefTensor::normal(rows, 3);
  RefTensor d_logits = RefTensor::zeros(rows * vocab);
  const Choice choice(rows, vocab);
  RefTensor temperature = choice.temperature_ref;
  ref::log_prob_bwd<double>(d_logits.mat(vocab), d_logprob.vec(), d_entropy.vec(),
                            logits.mat(vocab), choice.ids(), temperature.vec());
  const auto loss = [&] {
    RefTensor logprob = RefTensor::zeros(rows);
    RefTensor entropy = RefTensor::zeros(rows);
    ref::log_prob<double>(logprob.vec(), entropy.vec(), logits.mat(vocab), choice.ids(),
                          temperature.vec());
    return dot(logprob.values(), d_logprob.values()) + dot(entropy.values(), d_entropy.values());
  };
  expect_central_differences(loss, logits, d_logits, "d_logits");
}

std::vector<float> both(const ExecCtx& ctx, std::int64_t rows, std::int64_t vocab) {
  Rows logits = Rows::normal(rows, vocab, 1, 2.0);
  const Choice choice(rows, vocab);
  Tensor logprob(rows);
  Tensor entropy(rows);
  ops::log_prob(ctx, logprob.vec(), entropy.vec(), logits.mat(), choice.ids(), choice.temp());
  Rows d_logits(rows, vocab);
  ops::log_prob_bwd(ctx, d_logits.mat(), logprob.vec(), entropy.vec(), logits.mat(), choice.ids(),
                    choice.temp());
  std::vector<float> all{logprob.begin(), logprob.end()};
  append(all, {entropy.begin(), entropy.end()});
  append(all, d_logits.values());
  return all;
}

TEST(LogProb, SameBitsForAnyThreadCount) {
  expect_same_for_any_thread_count([](const ExecCtx& ctx) { return both(ctx, 0, 33); });
  expect_same_for_any_thread_count([](const ExecCtx& ctx) { return both(ctx, 60, 1500); });
  expect_same_for_any_thread_count([](const ExecCtx& ctx) { return both(ctx, 3, 163840); });
}

TEST(LogProb, ARowHasTheSameBitsWhereverItStands) {
  const PoisonedContext ctx;
  constexpr std::int64_t kRows = 40;
  const std::vector<float> temperature(kRows, 0.9F);
  for (const std::int64_t vocab : {1, 7, 1111, 2048, 32768, 163840, 170001}) {
    SCOPED_TRACE(testing::Message() << "V " << vocab);
    Rows logits = Rows::normal(kRows, vocab, 1, 3.0);
    const std::vector<std::int32_t> targets(kRows, checked_cast<std::int32_t>(vocab / 2));
    Tensor batch(kRows);
    Tensor entropy(kRows);
    ops::log_prob(*ctx, batch.vec(), entropy.vec(), logits.mat(), {targets.data(), {kRows}},
                  {temperature.data(), {kRows}});
    for (const std::int64_t r : {0, 13, 39}) {
      for (const std::int64_t padding : {0, 5}) {  // rows on 16 bytes, and not
        Rows moved = Rows::filled(3, vocab, 0.0F, padding);
        std::copy_n(logits.row(r), vocab, moved.row(1));
        Tensor logprob(3);
        Tensor h(3);
        ops::log_prob(*ctx, logprob.vec(), h.vec(), moved.mat(), {targets.data(), {3}},
                      {temperature.data(), {3}});
        EXPECT_EQ(logprob[1], batch[r]);
        EXPECT_EQ(h[1], entropy[r]);
      }
    }
  }
}

/// Most of a wide row at -inf, as a mask leaves it, with what is finite in one far corner.
TEST(LogProb, WideMaskedRows) {
  const PoisonedContext ctx;
  const std::int64_t vocab = 163840;
  Rows logits = Rows::filled(2, vocab, -kInf);
  logits.row(0)[vocab - 1] = 1.0F;
  logits.row(0)[70000] = 1.0F;
  const std::int32_t targets[] = {70000, 70000};
  const float temperature[] = {0.5F, 1.0F};
  float logprob[2];
  float entropy[2];
  logits.row(1)[3] = std::numeric_limits<float>::quiet_NaN();  // among -inf alone
  logits.row(1)[70000] = 2.0F;
  ops::log_prob(*ctx, {logprob, {2}}, {entropy, {2}}, logits.mat(), {targets, {2}},
                {temperature, {2}});
  EXPECT_NEAR(logprob[0], -std::log(2.0), 1e-6);
  EXPECT_NEAR(entropy[0], std::log(2.0), 1e-6);
  EXPECT_TRUE(std::isnan(logprob[1]));
  EXPECT_TRUE(std::isnan(entropy[1]));
}

TEST(LogProb, EveryInstructionSetIsWithinTheBound) {
  const PoisonedContext ctx;
  const std::int64_t vocab = 1111;
  Rows logits = Rows::normal(4, vocab, 1, 3.0);
  const Choice choice(4, vocab);
  RefTensor logits_ref(logits.values<double>());
  RefTensor temperature = choice.temperature_ref;
  RefTensor e_logprob = RefTensor::zeros(4);
  RefTensor e_entropy = RefTensor::zeros(4);
  ref::log_prob<double>(e_logprob.vec(), e_entropy.vec(), logits_ref.mat(vocab), choice.ids(),
                        temperature.vec());
  for_each_simd_target([&](const char* target) {
    Tensor logprob(4);
    cpu_loss_ops().log_prob(*ctx, logprob.vec(), {}, logits.mat(), choice.ids(), choice.temp());
    EXPECT_TRUE(close(logprob.data(), e_logprob.values(), tolerance(vocab, largest_z(logits, 0.7))))
        << target;
  });
}

}  // namespace
}  // namespace tandem::test
