// algo_options.cpp — the [algo] table's words turned into the enums of the losses. The config has
// already refused unknown words, so one that reaches this file unmatched is our bug.
#include <array>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "rl/advantage.h"
#include "rl/policy_loss.h"

namespace tandem {
namespace {

template <typename Enum, std::size_t N>
Enum lookup(const std::array<std::pair<std::string_view, Enum>, N>& names, std::string_view name) {
  for (const auto& [known, value] : names) {
    if (known == name) {
      return value;
    }
  }
  TDM_CHECK(false, name);
  return names[0].second;
}

struct Estimator {
  AdvantageEstimator advantage = AdvantageEstimator::kGrpo;
  PolicyLossKind loss = PolicyLossKind::kPpoClip;
};

Estimator estimator(std::string_view name) {
  using A = AdvantageEstimator;
  using L = PolicyLossKind;
  static constexpr std::array<std::pair<std::string_view, Estimator>, 7> kNames = {{
      {"grpo", {A::kGrpo, L::kPpoClip}},
      {"gspo", {A::kGrpo, L::kGspo}},
      {"cispo", {A::kGrpo, L::kCispo}},
      {"reinforce", {A::kGrpo, L::kReinforce}},
      {"rloo", {A::kRloo, L::kPpoClip}},
      {"reinforce_plus_plus", {A::kReinforcePlusPlus, L::kPpoClip}},
      {"reinforce_plus_plus_baseline", {A::kReinforcePlusPlusBaseline, L::kPpoClip}},
  }};
  return lookup(kNames, name);
}

KlKind kl_kind(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, KlKind>, 4> kNames = {
      {{"k1", KlKind::kK1},
       {"k2", KlKind::kK2},
       {"k3", KlKind::kK3},
       {"low_var_kl", KlKind::kLowVarKl}}};
  return lookup(kNames, name);
}

LossAggregation aggregation(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, LossAggregation>, 4> kNames = {
      {{"token-mean", LossAggregation::kTokenMean},
       {"seq-mean-token-mean", LossAggregation::kSeqMeanTokenMean},
       {"seq-mean-token-sum", LossAggregation::kSeqMeanTokenSum},
       {"constant", LossAggregation::kConstant}}};
  return lookup(kNames, name);
}

}  // namespace

PolicyLossOptions policy_loss_options(const RlConfig& config) {
  const AlgoConfig& algo = config.algo;
  TDM_CHECK(algo.eps_clip_high.has_value() && config.train.global_batch_size.has_value());
  PolicyLossOptions options;
  options.kind = estimator(algo.advantage_estimator).loss;
  options.ratio_low = 1.0 - algo.eps_clip;
  options.ratio_high = 1.0 + *algo.eps_clip_high;
  options.dual_clip = algo.eps_clip_c;
  options.kl_kind = kl_kind(algo.kl_loss_type);
  options.kl_loss_coef = algo.use_kl_loss ? algo.kl_loss_coef : 0.0;
  options.entropy_coef = algo.entropy_coef;
  if (algo.use_tis) {
    options.mismatch = {MismatchCorrection::kTis, algo.tis_clip_low, algo.tis_clip};
  }
  options.use_rollout_logprobs = algo.use_rollout_logprobs;
  if (algo.use_opsm) {
    options.opsm_delta = algo.opsm_delta;
  }
  options.aggregation = aggregation(algo.loss_aggregation);
  options.global_batch_size = *config.train.global_batch_size;
  options.constant_length = config.rollout.rollout_max_response_len;
  return options;
}

AdvantageOptions advantage_options(const RlConfig& config) {
  const AlgoConfig& algo = config.algo;
  return {.estimator = estimator(algo.advantage_estimator).advantage,
          .std_normalization = algo.grpo_std_normalization,
          .rewards_normalization = algo.rewards_normalization,
          .normalize_advantages = algo.normalize_advantages,
          .kl_coef = algo.kl_coef,
          .gamma = algo.gamma};
}

}  // namespace tandem
