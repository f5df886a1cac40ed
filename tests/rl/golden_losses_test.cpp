// Policy losses, KL estimators and advantages against an independent fp64 program that
// differentiates by autograd (tools/golden/golden_rl.py). The fixture has 9 significant digits,
// hence a tolerance of 1e-8 of the value, and of 1 near 0.
#include <numeric>

#include "rl/advantage.h"
#include "rl/policy_loss.h"
#include "support/golden.h"

namespace tandem::test {
namespace {

using Json = nlohmann::json;

void expect_values(std::span<const double> actual, const Json& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double e = expected[i];
    EXPECT_NEAR(actual[i], e, 1e-8 * std::max(1.0, std::abs(e))) << what << " token " << i;
  }
}

struct Loss {
  const char* name;  // in rl_losses.json
  PolicyLossKind kind;
  MismatchCorrection correction = MismatchCorrection::kNone;
};

/// The fixture's three sequences as one micro-batch.
struct Batch {
  Json golden = golden_json("rl_losses.json");
  std::vector<double> logprobs = golden["logp"];
  std::vector<double> old_logprobs = golden["old_logp"];
  std::vector<double> rollout_logprobs = golden["behaviour_logp"];
  std::vector<double> advantages = golden["advantage"];
  std::vector<std::uint8_t> mask = golden["mask"];
  std::vector<std::int64_t> cu_seqlens{0};
  std::vector<std::int64_t> num_trainable;

  Batch() {
    for (const std::int64_t length : golden["lengths"]) {
      const auto begin = mask.begin() + cu_seqlens.back();
      num_trainable.push_back(std::accumulate(begin, begin + length, std::int64_t{0}));
      cu_seqlens.push_back(cu_seqlens.back() + length);
    }
  }
  [[nodiscard]] PolicyLossOptions options(const Loss& loss, const Json& settings) const {
    PolicyLossOptions o;
    o.kind = loss.kind;
    o.ratio_low = 1.0 - settings.value("eps_low", 0.2);
    o.ratio_high = 1.0 + settings.value("eps_high", 0.2);
    if (settings.contains("c")) {
      o.dual_clip = settings["c"].get<double>();
    }
    o.sapo_tau_positive = settings.value("tau_positive", 1.0);
    o.sapo_tau_negative = settings.value("tau_negative", 1.05);
    o.mismatch = {loss.correction, settings.value("weight_low", 0.0),
                  settings.value("weight_high", 2.0)};
    o.global_batch_size = 3;
    o.constant_length = golden["constant_length"];
    return o;
  }
  [[nodiscard]] PolicyLossOutput run(const PolicyLossOptions& options) const {
    const std::vector<double> weights = sample_weights(options, num_trainable);
    PolicyLossInput<double> input;
    input.logprobs = logprobs;
    input.old_logprobs = old_logprobs;
    input.rollout_logprobs = rollout_logprobs;
    input.advantages = advantages;
    input.mask = mask;
    input.cu_seqlens = cu_seqlens;
    input.sample_weights = weights;
    return policy_loss(input, options);
  }
};

TEST(GoldenLosses, EveryLossInEveryAggregation) {
  const Loss losses[] = {
      {"ppo_clip", PolicyLossKind::kPpoClip},
      {"ppo_dual_clip", PolicyLossKind::kPpoClip},
      {"ppo_dual_clip_tight", PolicyLossKind::kPpoClip},
      {"gspo", PolicyLossKind::kGspo},
      {"gspo_wide", PolicyLossKind::kGspo},
      {"cispo_upper", PolicyLossKind::kCispo},
      {"cispo", PolicyLossKind::kCispo},
      {"sapo", PolicyLossKind::kSapo},
      {"reinforce", PolicyLossKind::kReinforce},
      {"ppo_clip_tis", PolicyLossKind::kPpoClip, MismatchCorrection::kTis},
      {"ppo_clip_icepop", PolicyLossKind::kPpoClip, MismatchCorrection::kIcePop},
  };
  const std::pair<const char*, LossAggregation> aggregations[] = {
      {"token_mean", LossAggregation::kTokenMean},
      {"seq_mean_token_mean", LossAggregation::kSeqMeanTokenMean},
      {"seq_mean_token_sum", LossAggregation::kSeqMeanTokenSum},
      {"constant", LossAggregation::kConstant},
  };
  const Batch batch;
  EXPECT_EQ(batch.golden["losses"].size(), std::size(losses));
  for (const Loss& loss : losses) {
    const Json& golden = batch.golden["losses"].at(loss.name);
    PolicyLossOptions options = batch.options(loss, golden);
    for (const auto& [name, aggregation] : aggregations) {
      options.aggregation = aggregation;
      const PolicyLossOutput out = batch.run(options);
      const std::string what = fmt::format("{} {}", loss.name, name);
      const double expected = golden.at(name)["loss"];
      EXPECT_NEAR(out.stats.pg_loss, expected, 1e-8 * std::max(1.0, std::abs(expected))) << what;
      expect_values(out.d_logprobs, golden.at(name)["grad_logp"], what);
    }
  }
}

TEST(GoldenLosses, KlEstimators) {
  const Batch batch;
  const std::vector<double> ref = batch.golden["ref_logp"];
  const std::pair<const char*, KlKind> kinds[] = {{"k1", KlKind::kK1},
                                                  {"k2", KlKind::kK2},
                                                  {"k3", KlKind::kK3},
                                                  {"low_var_kl", KlKind::kLowVarKl}};
  for (const auto& [name, kind] : kinds) {
    std::vector<double> values;
    std::vector<double> gradients;
    for (std::size_t i = 0; i < ref.size(); ++i) {
      const KlTerm term = kl_term(kind, batch.logprobs[i] - ref[i]);
      values.push_back(term.value);
      gradients.push_back(term.gradient);
    }
    expect_values(values, batch.golden["kl"][name]["value"], name);
    expect_values(gradients, batch.golden["kl"][name]["grad_logp"], name);
  }
}

TEST(GoldenLosses, GroupAdvantages) {
  const Json golden = golden_json("rl_losses.json")["advantages"]["groups"];
  AdvantageOptions dr_grpo;
  dr_grpo.std_normalization = false;
  AdvantageOptions rloo;
  rloo.estimator = AdvantageEstimator::kRloo;
  for (const Json& group : golden) {
    const std::vector<double> rewards = group["rewards"];
    const std::vector<std::uint8_t> removed(rewards.size(), 0);
    expect_values(group_advantages(rewards, removed, {}), group["grpo_eps_1e-6"], "grpo");
    expect_values(group_advantages(rewards, removed, dr_grpo), group["dr_grpo"], "dr_grpo");
    expect_values(group_advantages(rewards, removed, rloo), group["rloo"], "rloo");
  }
}

TEST(GoldenLosses, GaeAndWhitening) {
  const Json golden = golden_json("rl_losses.json")["advantages"];
  const Json& g = golden["gae"];
  const std::vector<double> rewards = g["rewards"];
  const std::vector<double> values = g["values"];
  const std::vector<std::uint8_t> all(rewards.size(), 1);
  expect_values(gae(rewards, values, all, g["gamma"], g["lambda"]).advantages, g["advantages"],
                "gae");
  std::vector<double> whitened = golden["whiten"]["values"];
  whiten(whitened, golden["whiten"]["mask"].get<std::vector<std::uint8_t>>());
  expect_values(whitened, golden["whiten"]["result_zero_where_masked"], "whiten");
}

}  // namespace
}  // namespace tandem::test
