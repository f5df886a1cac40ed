#include "rl/advantage.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "core/rng.h"

namespace tandem {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(GroupAdvantages, EqualRewardsGiveExactZeroHoweverTheyRound) {
  // 0.1 * 3 is not 0.3: equal rewards that differ in the last bit must not become +-1.
  const std::vector<double> rewards = {0.1 * 3, 0.3, 0.1 + 0.2, 0.3};
  const std::vector<std::uint8_t> removed(4, 0);
  ASSERT_NE(rewards[0], rewards[1]);
  EXPECT_EQ(group_advantages(rewards, removed, {}), std::vector<double>(4, 0.0));
  EXPECT_EQ(filter_group(GroupFilter::kRewardNonzeroStd, rewards, removed),
            FilterVerdict::kZeroStd);
}

TEST(GroupAdvantages, RemovedAndUngradedSamplesAreLeftOut) {
  const std::vector<double> rewards = {1, 0, 100, kNan, 0};
  const std::vector<std::uint8_t> removed = {0, 0, 1, 0, 0};
  const auto with = group_advantages(rewards, removed, {});
  const auto without =
      group_advantages(std::vector<double>{1, 0, 0}, std::vector<std::uint8_t>(3, 0), {});
  EXPECT_EQ(with, (std::vector<double>{without[0], without[1], 0.0, 0.0, without[2]}));
}

TEST(GroupAdvantages, OneSampleLeftGivesNoAdvantage) {
  const std::vector<double> rewards = {1, 0};
  const std::vector<std::uint8_t> removed = {0, 1};
  for (const auto estimator : {AdvantageEstimator::kGrpo, AdvantageEstimator::kRloo,
                               AdvantageEstimator::kReinforcePlusPlusBaseline}) {
    EXPECT_EQ(group_advantages(rewards, removed, {.estimator = estimator}),
              std::vector<double>(2, 0.0));
  }
  EXPECT_EQ(filter_group(GroupFilter::kRewardNonzeroStd, rewards, removed),
            FilterVerdict::kTooFewSamples);
  EXPECT_EQ(filter_group(GroupFilter::kNone, rewards, removed), FilterVerdict::kKeep);
}

TEST(GroupAdvantages, RlooIsTheLeaveOneOutBaseline) {
  Rng rng(7);
  std::vector<double> rewards(6);
  for (double& reward : rewards) {
    reward = rng.normal();
  }
  const auto rloo = group_advantages(rewards, std::vector<std::uint8_t>(6, 0),
                                     {.estimator = AdvantageEstimator::kRloo});
  for (std::size_t i = 0; i < 6; ++i) {
    double others = 0;
    for (std::size_t j = 0; j < 6; ++j) {
      others += j == i ? 0.0 : rewards[j] / 5;
    }
    EXPECT_NEAR(rloo[i], rewards[i] - others, 1e-12);
  }
}

TEST(GroupAdvantages, RawRewardsWhenNormalisationIsOff) {
  EXPECT_EQ(group_advantages(std::vector<double>{1, 0}, std::vector<std::uint8_t>(2, 0),
                             {.rewards_normalization = false}),
            (std::vector<double>{1, 0}));
}

/// Two groups, interleaved; the second sample has a tool token in its middle.
struct Rollout {
  std::vector<double> rewards = {1, 0, 0, 1};
  std::vector<std::int64_t> groups = {5, 9, 5, 9};
  std::vector<std::uint8_t> removed = {0, 0, 0, 0};
  std::vector<std::int64_t> cu_seqlens = {0, 2, 5, 6, 8};
  std::vector<std::uint8_t> mask = {1, 1, 1, 0, 1, 1, 1, 1};
  std::vector<double> kl = {0.1, 0.2, 0.3, 99.0, -0.4, 0.5, 0.6, -0.7};

  [[nodiscard]] std::vector<double> tokens(const AdvantageOptions& options) const {
    return compute_advantages({rewards, groups, removed, cu_seqlens, mask, kl}, options).per_token;
  }
};

TEST(ComputeAdvantages, GroupsNeedNotBeNeighboursAndMaskedTokensGetZero) {
  const auto tokens = Rollout().tokens({.std_normalization = false});
  EXPECT_EQ(tokens, (std::vector<double>{0.5, 0.5, -0.5, 0, -0.5, -0.5, 0.5, 0.5}));
}

TEST(ComputeAdvantages, ReinforcePlusPlusSkipsToolTokensAndTheirKl) {
  const AdvantageOptions options{
      .estimator = AdvantageEstimator::kReinforcePlusPlus, .kl_coef = 0.5, .gamma = 0.5};
  const auto tokens = Rollout().tokens(options);
  // Sample 0: last = 1 - 0.5*0.2, first = -0.5*0.1 + 0.5*last.
  EXPECT_NEAR(tokens[1], 0.9, 1e-15);
  EXPECT_NEAR(tokens[0], -0.05 + 0.45, 1e-15);
  // Sample 1, reward 0: the tool token is neither a step nor a cost.
  EXPECT_NEAR(tokens[4], 0.2, 1e-15);
  EXPECT_EQ(tokens[3], 0.0);
  EXPECT_NEAR(tokens[2], -0.15 + 0.5 * 0.2, 1e-15);
}

TEST(ComputeAdvantages, WhiteningHasMeanZeroAndStdOneOverTrainableTokensOnly) {
  Rollout rollout;
  rollout.removed[2] = 1;  // its token is outside the batch
  const auto tokens = rollout.tokens({.estimator = AdvantageEstimator::kReinforcePlusPlusBaseline,
                                      .normalize_advantages = true,
                                      .kl_coef = 0.1});
  double sum = 0;
  double squares = 0;
  for (const double token : tokens) {
    sum += token;
    squares += token * token;
  }
  EXPECT_NEAR(sum, 0.0, 1e-12);
  EXPECT_NEAR(squares, 5.0, 1e-4);  // 6 trainable tokens, n-1; eps 1e-8 under the root
  EXPECT_EQ(tokens[3], 0.0);
  EXPECT_EQ(tokens[5], 0.0);
}

TEST(ComputeAdvantages, CountsRewardsThatAreNotFinite) {
  Rollout rollout;
  rollout.rewards[1] = kNan;
  const auto out = compute_advantages({rollout.rewards, rollout.groups, rollout.removed,
                                       rollout.cu_seqlens, rollout.mask, rollout.kl},
                                      {});
  EXPECT_EQ(out.num_nonfinite_rewards, 1);
  for (const double token : out.per_token) {
    EXPECT_TRUE(std::isfinite(token));
  }
}

TEST(ComputeAdvantages, EveryOptionChangesTheResult) {
  const Rollout rollout;
  const AdvantageOptions pp{.estimator = AdvantageEstimator::kReinforcePlusPlus};
  const auto with = [](AdvantageOptions options, auto change) {
    change(options);
    return options;
  };
  const auto grpo = rollout.tokens({});
  EXPECT_NE(rollout.tokens({.estimator = AdvantageEstimator::kRloo}), grpo);
  EXPECT_NE(rollout.tokens({.std_normalization = false}), grpo);
  EXPECT_NE(rollout.tokens({.rewards_normalization = false}), grpo);
  EXPECT_NE(rollout.tokens({.normalize_advantages = true}), grpo);
  EXPECT_NE(rollout.tokens(pp), grpo);
  EXPECT_NE(rollout.tokens(with(pp, [](auto& o) { o.kl_coef = 0.1; })), rollout.tokens(pp));
  EXPECT_NE(rollout.tokens(with(pp, [](auto& o) { o.gamma = 0.9; })), rollout.tokens(pp));
}

TEST(Whiten, NoTrainableTokensIsNoAccident) {
  std::vector<double> values = {1, 2};
  whiten(values, std::vector<std::uint8_t>(2, 0));
  EXPECT_EQ(values, (std::vector<double>{0, 0}));
}

TEST(GroupFilter, Names) {
  EXPECT_TRUE(parse_group_filter("none").ok());
  EXPECT_TRUE(parse_group_filter("check_reward_nonzero_std").ok());
  EXPECT_FALSE(parse_group_filter("check_reward_std").ok());
}

}  // namespace
}  // namespace tandem
