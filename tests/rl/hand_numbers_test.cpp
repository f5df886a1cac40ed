// The hand-checkable numbers of the RL specification's section 9, each to its stated digits.
// (Number 11 is AdamW's and lives with the optimizer.)
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "rl/advantage.h"
#include "rl/metrics.h"
#include "rl/mismatch.h"
#include "rl/policy_loss.h"

namespace tandem {
namespace {

/// Equal when both round to the same number of decimals: `stated` was rounded to that many.
void expect_digits(double actual, double stated, int decimals) {
  EXPECT_LE(std::abs(actual - stated), 0.5000001 * std::pow(10.0, -decimals)) << actual;
}

std::vector<double> advantages(const std::vector<double>& rewards,
                               const AdvantageOptions& options) {
  return group_advantages(rewards, std::vector<std::uint8_t>(rewards.size(), 0), options);
}

TEST(HandNumbers, N1GroupAdvantages) {
  const std::vector<double> rewards = {1, 0, 0, 1, 0, 0, 0, 0};
  expect_digits(mean_std(rewards).std, 0.4629100, 7);
  const auto grpo = advantages(rewards, {});
  expect_digits(grpo[0], 1.6201817, 7);
  expect_digits(grpo[1], -0.5400606, 7);
  const auto dr_grpo = advantages(rewards, {.std_normalization = false});
  EXPECT_EQ(dr_grpo[0], 0.75);
  EXPECT_EQ(dr_grpo[1], -0.25);
  const auto rloo = advantages(rewards, {.estimator = AdvantageEstimator::kRloo});
  expect_digits(rloo[0], 0.8571429, 7);
  expect_digits(rloo[1], -0.2857143, 7);
  const auto baseline =
      advantages(rewards, {.estimator = AdvantageEstimator::kReinforcePlusPlusBaseline});
  EXPECT_EQ(baseline[0], 0.75);
  for (const auto estimator : {AdvantageEstimator::kGrpo, AdvantageEstimator::kRloo,
                               AdvantageEstimator::kReinforcePlusPlusBaseline}) {
    EXPECT_EQ(advantages(std::vector<double>(8, 1.0), {.estimator = estimator}),
              std::vector<double>(8, 0.0));
  }
}

TEST(HandNumbers, N2KlEstimators) {
  const auto check = [](double logp, double logq, double k1, double k2, double k3) {
    expect_digits(kl_term(KlKind::kK1, logp - logq).value, k1, 7);
    expect_digits(kl_term(KlKind::kK2, logp - logq).value, k2, 7);
    expect_digits(kl_term(KlKind::kK3, logp - logq).value, k3, 7);
    expect_digits(kl_term(KlKind::kLowVarKl, logp - logq).value, k3, 7);
  };
  check(-0.5, -0.7, 0.2, 0.02, 0.0187308);
  check(-1.2, -1.0, -0.2, 0.02, 0.0214028);
  check(-2.0, -2.5, 0.5, 0.125, 0.1065307);
}

/// The loss of one token with ratio rho.
double one_token_loss(double rho, double advantage, const PolicyLossOptions& options) {
  const std::array<double, 1> logprobs = {std::log(rho)};
  const std::array<double, 1> old = {0.0};
  const std::array<double, 1> a = {advantage};
  const std::array<std::uint8_t, 1> mask = {1};
  const std::array<std::int64_t, 2> cu = {0, 1};
  const std::array<double, 1> weight = {1.0};
  return policy_loss<double>({.logprobs = logprobs,
                              .old_logprobs = old,
                              .advantages = a,
                              .mask = mask,
                              .cu_seqlens = cu,
                              .sample_weights = weight},
                             options)
      .stats.pg_loss;
}

TEST(HandNumbers, N3PpoClip) {
  PolicyLossOptions options{.ratio_low = 0.8, .ratio_high = 1.28};
  expect_digits(one_token_loss(1.5, 1, options), -1.28, 12);
  expect_digits(one_token_loss(1.5, -1, options), 1.5, 12);
  expect_digits(one_token_loss(0.5, 1, options), -0.5, 12);
  expect_digits(one_token_loss(0.5, -1, options), 0.8, 12);
  expect_digits(one_token_loss(5, -1, options), 5, 12);
  options.dual_clip = 3.0;
  expect_digits(one_token_loss(5, -1, options), 3, 12);
  expect_digits(one_token_loss(1.5, 1, options), -1.28, 12);
}

TEST(HandNumbers, N4GspoAndSapo) {
  const std::array<double, 4> logprobs = {-0.9, -1.2, -0.7, -1.0};
  const std::array<double, 4> old = {-1.0, -1.0, -1.0, -1.0};
  const std::array<double, 4> a = {1, 1, 1, 1};
  const std::array<std::uint8_t, 4> mask = {1, 1, 1, 1};
  const std::array<std::int64_t, 2> cu = {0, 4};
  const std::array<double, 1> weight = {0.25};
  const auto gspo = policy_loss<double>({.logprobs = logprobs,
                                         .old_logprobs = old,
                                         .advantages = a,
                                         .mask = mask,
                                         .cu_seqlens = cu,
                                         .sample_weights = weight},
                                        {.kind = PolicyLossKind::kGspo});
  expect_digits(-gspo.stats.pg_loss, 1.0512711, 7);
  const PolicyLossOptions sapo{.kind = PolicyLossKind::kSapo};
  expect_digits(one_token_loss(1.0, 1, sapo), -2.0, 12);
  expect_digits(one_token_loss(1.5, 1, sapo), -2.4898373, 7);
  expect_digits(one_token_loss(1.5, -1, sapo), 2.3935855, 7);
}

TEST(HandNumbers, N5GaeSkipsToolTokens) {
  const auto check = [](const GaeOutput& out, const std::array<std::size_t, 3>& at) {
    expect_digits(out.advantages[at[0]], 0.751, 12);
    expect_digits(out.advantages[at[1]], 0.58, 12);
    expect_digits(out.advantages[at[2]], 0.4, 12);
    expect_digits(out.returns[at[0]], 0.951, 12);
    expect_digits(out.returns[at[1]], 0.98, 12);
    expect_digits(out.returns[at[2]], 1.0, 12);
  };
  const std::array<std::uint8_t, 3> all = {1, 1, 1};
  check(gae(std::array{0.0, 0.0, 1.0}, std::array{0.2, 0.4, 0.6}, all, 1.0, 0.95), {0, 1, 2});
  const std::array<std::uint8_t, 5> with_tools = {1, 0, 1, 0, 1};
  check(gae(std::array{0.0, 7.0, 0.0, -3.0, 1.0}, std::array{0.2, 9.0, 0.4, 5.0, 0.6}, with_tools,
            1.0, 0.95),
        {0, 2, 4});
}

TEST(HandNumbers, N6Aggregation) {
  const std::array<std::int64_t, 2> counts = {4, 2};
  const auto total = [&](LossAggregation mode) {
    const auto weights =
        sample_weights({.aggregation = mode, .global_batch_size = 2, .constant_length = 8}, counts);
    return weights[0] * 4 * 1.0 + weights[1] * 2 * 2.0;
  };
  expect_digits(total(LossAggregation::kTokenMean), 1.3333, 4);
  expect_digits(total(LossAggregation::kSeqMeanTokenMean), 1.5, 12);
  expect_digits(total(LossAggregation::kSeqMeanTokenSum), 4, 12);
  expect_digits(total(LossAggregation::kConstant), 0.5, 12);
}

TEST(HandNumbers, N7MismatchWeights) {
  const std::array<double, 4> log_ratios = {0.05, -0.3, 1.2, -1.0};
  const std::array<std::uint8_t, 4> mask = {1, 1, 1, 1};
  const auto weights = [&](const MismatchOptions& options) {
    std::array<double, 4> out{};
    mismatch_weights(log_ratios, mask, options, out);
    return out;
  };
  const auto free = weights({MismatchCorrection::kTis, 0.0, 1e9});
  const std::array<double, 4> stated = {1.0512711, 0.7408182, 3.3201169, 0.3678794};
  for (std::size_t t = 0; t < 4; ++t) {
    expect_digits(free[t], stated[t], 7);
  }
  const auto tis = weights({MismatchCorrection::kTis, 0.0, 2.0});
  EXPECT_EQ(tis[2], 2.0);
  EXPECT_EQ(tis[0], free[0]);
  const auto icepop = weights({MismatchCorrection::kIcePop, 0.5, 2.0});
  EXPECT_EQ(icepop, (std::array<double, 4>{free[0], free[1], 0.0, 0.0}));
  expect_digits(weights({MismatchCorrection::kSequence, 0.0, 2.0})[0], 0.9512294, 7);
  expect_digits(weights({MismatchCorrection::kGeometric, 0.0, 2.0})[3], 0.9875778, 7);
  const double sum = std::accumulate(tis.begin(), tis.end(), 0.0);
  const double squares = std::inner_product(tis.begin(), tis.end(), tis.begin(), 0.0);
  expect_digits(effective_sample_size(sum, squares, 4), 0.7472962, 7);
}

TEST(HandNumbers, N8ReinforcePlusPlus) {
  const std::array<double, 1> rewards = {1.0};
  const std::array<std::int64_t, 1> group = {0};
  const std::array<std::uint8_t, 1> removed = {0};
  const std::array<std::int64_t, 2> cu = {0, 3};
  const std::array<std::uint8_t, 3> mask = {1, 1, 1};
  const std::array<double, 3> kl = {0.2, -0.1, 0.3};
  AdvantageOptions options{.estimator = AdvantageEstimator::kReinforcePlusPlus, .kl_coef = 0.1};
  const AdvantageInput input{rewards, group, removed, cu, mask, kl};
  const auto returns = compute_advantages(input, options).per_token;
  expect_digits(returns[0], 0.96, 12);
  expect_digits(returns[1], 0.98, 12);
  expect_digits(returns[2], 0.97, 12);
  options.normalize_advantages = true;
  const auto whitened = compute_advantages(input, options).per_token;
  expect_digits(whitened[0], -0.99995, 5);
  expect_digits(whitened[1], 0.99995, 5);
  expect_digits(whitened[2], 0.0, 5);
}

TEST(HandNumbers, N9PassAtK) {
  expect_digits(pass_at_k(8, 2, 1), 0.25, 12);
  expect_digits(pass_at_k(8, 2, 2), 0.4642857, 7);
  expect_digits(pass_at_k(8, 2, 4), 0.7857143, 7);
  EXPECT_EQ(pass_at_k(8, 2, 8), 1.0);
}

TEST(HandNumbers, N10OverlongPenalty) {
  const std::array<std::pair<std::int64_t, double>, 6> stated = {
      {{10, 0.0}, {12, 0.0}, {13, -0.25}, {14, -0.5}, {16, -1.0}, {17, -1.0}}};
  for (const auto& [length, penalty] : stated) {
    EXPECT_EQ(overlong_penalty(length, 16, 4), penalty) << length;
  }
}

TEST(HandNumbers, N12EntropyAndLogSoftmax) {
  const std::array<double, 3> logits = {2, 1, 0};
  expect_digits(entropy(logits, 1.0), 0.8323956, 7);
  expect_digits(entropy(logits, 0.5), 0.4410574, 7);
  const std::array<double, 3> at_one = {-0.4076060, -1.4076060, -2.4076060};
  const std::array<double, 3> at_half = {-0.1429316, -2.1429316, -4.1429316};
  for (std::size_t i = 0; i < 3; ++i) {
    expect_digits(log_softmax(logits, 1.0)[i], at_one[i], 7);
    expect_digits(log_softmax(logits, 0.5)[i], at_half[i], 7);
  }
}

}  // namespace
}  // namespace tandem
