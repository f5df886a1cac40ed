#include "rl/policy_loss.h"

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "core/checked_cast.h"
#include "core/rng.h"

namespace tandem {
namespace {

/// A random optimizer step: samples of 1 to 9 tokens, about a fifth of them masked, NaN where
/// masked.
struct Step {
  std::vector<double> logprobs, old_logprobs, rollout_logprobs, ref_logprobs, entropy, advantages;
  std::vector<std::uint8_t> mask;
  std::vector<std::int64_t> cu_seqlens = {0};

  explicit Step(std::uint64_t seed, int num_samples = 6) {
    Rng rng(seed);
    for (int i = 0; i < num_samples; ++i) {
      const double advantage = rng.normal();
      const std::uint64_t length = 1 + rng.below(9);
      for (std::uint64_t t = 0; t < length; ++t) {
        const bool is_masked = t > 0 && rng.below(5) == 0;
        const double base = -0.1 - 2.0 * rng.uniform();
        const auto put = [&](std::vector<double>& to, double value) {
          to.push_back(is_masked ? std::numeric_limits<double>::quiet_NaN() : value);
        };
        put(logprobs, base + 0.4 * rng.normal());
        put(old_logprobs, base);
        put(rollout_logprobs, base + 0.5 * rng.normal());
        put(ref_logprobs, base + 0.3 * rng.normal());
        put(entropy, rng.uniform());
        advantages.push_back(advantage);
        mask.push_back(is_masked ? 0 : 1);
      }
      cu_seqlens.push_back(isize(mask));
    }
  }

  [[nodiscard]] std::size_t num_samples() const { return cu_seqlens.size() - 1; }

  [[nodiscard]] std::vector<double> weights(const PolicyLossOptions& options) const {
    std::vector<std::int64_t> counts;
    for (std::size_t i = 0; i < num_samples(); ++i) {
      counts.push_back(std::accumulate(mask.begin() + cu_seqlens[i],
                                       mask.begin() + cu_seqlens[i + 1], std::int64_t{0}));
    }
    return sample_weights(options, counts);
  }

  /// Samples [first, last) as one micro-batch with the whole step's weights.
  [[nodiscard]] PolicyLossOutput run(const PolicyLossOptions& options, std::size_t first,
                                     std::size_t last) const {
    const std::vector<double> all_weights = weights(options);
    const auto begin = cu_seqlens[first];
    const auto cut = [&](const auto& v) {
      return std::span(v).subspan(usize(begin), usize(cu_seqlens[last] - begin));
    };
    std::vector<std::int64_t> local;
    for (std::size_t i = first; i <= last; ++i) {
      local.push_back(cu_seqlens[i] - begin);
    }
    return policy_loss<double>({cut(logprobs), cut(old_logprobs), cut(rollout_logprobs),
                                cut(ref_logprobs), cut(entropy), cut(advantages), cut(mask), local,
                                std::span<const double>(all_weights).subspan(first, last - first)},
                               options);
  }
  [[nodiscard]] PolicyLossOutput run(const PolicyLossOptions& options) const {
    return run(options, 0, num_samples());
  }
  [[nodiscard]] double loss(const PolicyLossOptions& options) const {
    return run(options).stats.total_loss(options);
  }
};

PolicyLossOptions with(PolicyLossOptions options,
                       const std::function<void(PolicyLossOptions&)>& change) {
  change(options);
  return options;
}

const PolicyLossOptions kBase{
    .ratio_low = 0.8, .ratio_high = 1.28, .global_batch_size = 6, .constant_length = 9};

std::vector<PolicyLossOptions> all_variants() {
  std::vector<PolicyLossOptions> variants;
  for (const auto kind : {PolicyLossKind::kPpoClip, PolicyLossKind::kGspo, PolicyLossKind::kCispo,
                          PolicyLossKind::kSapo, PolicyLossKind::kReinforce}) {
    for (const auto aggregation : {LossAggregation::kTokenMean, LossAggregation::kSeqMeanTokenMean,
                                   LossAggregation::kSeqMeanTokenSum, LossAggregation::kConstant}) {
      variants.push_back(with(kBase, [&](auto& o) {
        o.kind = kind;
        o.aggregation = aggregation;
        o.dual_clip = 1.5;
        o.kl_loss_coef = 0.1;
        o.entropy_coef = 0.01;
        o.mismatch = {MismatchCorrection::kTis, 0.5, 1.5};
        o.opsm_delta = 0.05;
      }));
    }
  }
  return variants;
}

TEST(PolicyLoss, AnyCutIntoMicroBatchesGivesTheSameGradient) {
  const Step step(11);
  for (const PolicyLossOptions& options : all_variants()) {
    const PolicyLossOutput whole = step.run(options);
    Rng rng(3);
    for (int trial = 0; trial < 5; ++trial) {
      std::vector<double> d_logprobs;
      std::vector<double> d_entropy;
      PolicyLossStats stats;
      for (std::size_t first = 0; first < step.num_samples();) {
        const std::size_t last = first + 1 + rng.below(step.num_samples() - first);
        const PolicyLossOutput part = step.run(options, first, last);
        d_logprobs.insert(d_logprobs.end(), part.d_logprobs.begin(), part.d_logprobs.end());
        d_entropy.insert(d_entropy.end(), part.d_entropy.begin(), part.d_entropy.end());
        stats.add(part.stats);
        first = last;
      }
      EXPECT_EQ(d_logprobs, whole.d_logprobs);  // bit for bit
      EXPECT_EQ(d_entropy, whole.d_entropy);
      EXPECT_NEAR(stats.total_loss(options), whole.stats.total_loss(options), 1e-12);
      EXPECT_NEAR(stats.mismatch_abs_sum, whole.stats.mismatch_abs_sum, 1e-12);
      EXPECT_EQ(stats.mismatch_abs_max, whole.stats.mismatch_abs_max);
      EXPECT_EQ(stats.num_tokens, whole.stats.num_tokens);
      EXPECT_EQ(stats.num_clipped, whole.stats.num_clipped);
    }
  }
}

/// Central differences of `value` by each trainable log-prob of `step`. Truncation error is O(h^2)
/// times the third derivative (below 1e3 here), rounding 1e-16 / h: with h = 1e-5 both are below
/// 1e-7.
void expect_gradient(Step step, const std::vector<double>& d_logprobs,
                     const std::function<double(const Step&)>& value) {
  constexpr double kH = 1e-5;
  for (std::size_t t = 0; t < step.mask.size(); ++t) {
    if (step.mask[t] == 0) {
      EXPECT_EQ(d_logprobs[t], 0.0);
      continue;
    }
    const double middle = step.logprobs[t];
    step.logprobs[t] = middle + kH;
    const double up = value(step);
    step.logprobs[t] = middle - kH;
    const double down = value(step);
    step.logprobs[t] = middle;
    EXPECT_NEAR(d_logprobs[t], (up - down) / (2 * kH), 1e-7) << "token " << t;
  }
}

TEST(PolicyLoss, GradientOfPpoAndSapoIsTheDerivativeOfTheLoss) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const Step step(seed);
    for (PolicyLossOptions options : all_variants()) {
      options.opsm_delta
          .reset();  // its on/off switch is held constant, so is not in the derivative
      if (options.kind == PolicyLossKind::kPpoClip || options.kind == PolicyLossKind::kSapo) {
        expect_gradient(step, step.run(options).d_logprobs,
                        [&](const Step& s) { return s.loss(options); });
      }
    }
  }
}

TEST(PolicyLoss, GradientOfGspoIsThatOfTheSequenceRatio) {
  // With the mean over a sample's own tokens the straight-through form equals the true derivative.
  const PolicyLossOptions options = with(kBase, [](auto& o) {
    o.kind = PolicyLossKind::kGspo;
    o.ratio_low = 0.9;
    o.ratio_high = 1.1;
  });
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const Step step(seed);
    expect_gradient(step, step.run(options).d_logprobs,
                    [&](const Step& s) { return s.loss(options); });
  }
}

TEST(PolicyLoss, GradientsOfCispoAndReinforceHoldTheirWeights) {
  for (const auto kind : {PolicyLossKind::kCispo, PolicyLossKind::kReinforce}) {
    const PolicyLossOptions options = with(kBase, [&](auto& o) { o.kind = kind; });
    const Step step(5);
    const std::vector<double> weights = step.weights(options);
    // The surrogate written out: -sg(w) * A * log-prob, with w fixed at the unperturbed point.
    const auto surrogate = [&](const Step& moved) {
      double sum = 0;
      for (std::size_t i = 0; i < step.num_samples(); ++i) {
        for (auto t = usize(step.cu_seqlens[i]); t < usize(step.cu_seqlens[i + 1]); ++t) {
          if (step.mask[t] != 0) {
            const double ratio = std::exp(step.logprobs[t] - step.old_logprobs[t]);
            const double w =
                kind == PolicyLossKind::kCispo ? std::min(std::max(ratio, 0.8), 1.28) : 1.0;
            sum -= weights[i] * w * step.advantages[t] * moved.logprobs[t];
          }
        }
      }
      return sum;
    };
    expect_gradient(step, step.run(options).d_logprobs, surrogate);
    EXPECT_NEAR(step.loss(options), surrogate(step), 1e-12);
  }
}

TEST(PolicyLoss, GradientOfEachKlEstimator) {
  for (const auto kind : {KlKind::kK1, KlKind::kK2, KlKind::kK3, KlKind::kLowVarKl}) {
    for (const double x : {-3.0, -0.5, 0.0, 0.2, 1.0, 4.0, 12.0}) {
      const double h = 1e-5;
      const double numeric = (kl_term(kind, x + h).value - kl_term(kind, x - h).value) / (2 * h);
      EXPECT_NEAR(kl_term(kind, x).gradient, numeric, 1e-7) << x;
    }
  }
  EXPECT_EQ(kl_term(KlKind::kLowVarKl, -1000).value, 10.0);
  EXPECT_EQ(kl_term(KlKind::kLowVarKl, -1000).gradient, 0.0);
  EXPECT_EQ(kl_term(KlKind::kLowVarKl, 1000).value, 10.0);
}

TEST(PolicyLoss, EveryOptionChangesTheLoss) {
  const Step step(2);
  const double base = step.loss(kBase);
  const std::vector<std::pair<const char*, std::function<void(PolicyLossOptions&)>>> changes = {
      {"ratio_low", [](auto& o) { o.ratio_low = 0.9; }},
      {"ratio_high", [](auto& o) { o.ratio_high = 1.1; }},
      {"dual_clip", [](auto& o) { o.dual_clip = 1.01; }},
      {"gspo", [](auto& o) { o.kind = PolicyLossKind::kGspo; }},
      {"cispo", [](auto& o) { o.kind = PolicyLossKind::kCispo; }},
      {"sapo", [](auto& o) { o.kind = PolicyLossKind::kSapo; }},
      {"reinforce", [](auto& o) { o.kind = PolicyLossKind::kReinforce; }},
      {"kl_loss_coef", [](auto& o) { o.kl_loss_coef = 0.1; }},
      {"entropy_coef", [](auto& o) { o.entropy_coef = 0.1; }},
      {"tis",
       [](auto& o) {
         o.mismatch = {MismatchCorrection::kTis, 0.0, 2.0};
       }},
      {"use_rollout_logprobs", [](auto& o) { o.use_rollout_logprobs = true; }},
      {"opsm", [](auto& o) { o.opsm_delta = 1e-4; }},
      {"token-mean", [](auto& o) { o.aggregation = LossAggregation::kTokenMean; }},
      {"seq-mean-token-sum", [](auto& o) { o.aggregation = LossAggregation::kSeqMeanTokenSum; }},
      {"constant", [](auto& o) { o.aggregation = LossAggregation::kConstant; }},
      {"global_batch_size", [](auto& o) { o.global_batch_size = 8; }}};
  for (const auto& [name, change] : changes) {
    EXPECT_NE(step.loss(with(kBase, change)), base) << name;
  }
  const auto kl = [&](KlKind kind) {
    return step.loss(with(kBase, [&](auto& o) {
      o.kl_loss_coef = 0.1;
      o.kl_kind = kind;
    }));
  };
  EXPECT_NE(kl(KlKind::kK1), kl(KlKind::kK2));
  EXPECT_NE(kl(KlKind::kK2), kl(KlKind::kK3));
  const auto tis = [&](double low, double high) {
    return step.loss(with(kBase, [&](auto& o) {
      o.mismatch = {MismatchCorrection::kTis, low, high};
    }));
  };
  EXPECT_NE(tis(0.0, 2.0), tis(0.0, 1.2));
  EXPECT_NE(tis(0.0, 2.0), tis(0.8, 2.0));
  const auto constant = [&](std::int64_t length) {
    return step.loss(with(kBase, [&](auto& o) {
      o.aggregation = LossAggregation::kConstant;
      o.constant_length = length;
    }));
  };
  EXPECT_NE(constant(9), constant(10));
}

TEST(PolicyLoss, EveryConfigKeyReachesTheLossOptions) {
  const auto options = [](const std::function<void(RlConfig&)>& change) {
    RlConfig config;
    config.train.num_steps_per_rollout = 1;
    change(config);
    config.derive();
    return policy_loss_options(config);
  };
  EXPECT_EQ(options([](auto&) {}).ratio_high, 1.2);
  EXPECT_EQ(options([](auto& c) { c.algo.eps_clip = 0.3; }).ratio_low, 0.7);
  EXPECT_EQ(options([](auto& c) { c.algo.eps_clip = 0.3; }).ratio_high, 1.3);
  EXPECT_EQ(options([](auto& c) { c.algo.eps_clip_high = 0.28; }).ratio_high, 1.28);
  EXPECT_EQ(options([](auto& c) { c.algo.eps_clip_c = 3.0; }).dual_clip, 3.0);
  EXPECT_EQ(options([](auto& c) { c.algo.advantage_estimator = "gspo"; }).kind,
            PolicyLossKind::kGspo);
  EXPECT_EQ(options([](auto& c) { c.algo.advantage_estimator = "cispo"; }).kind,
            PolicyLossKind::kCispo);
  EXPECT_EQ(options([](auto& c) { c.algo.advantage_estimator = "reinforce"; }).kind,
            PolicyLossKind::kReinforce);
  EXPECT_EQ(options([](auto& c) { c.algo.kl_loss_type = "k2"; }).kl_kind, KlKind::kK2);
  EXPECT_EQ(options([](auto& c) {
              c.algo.use_kl_loss = true;
              c.algo.kl_loss_coef = 0.5;
            }).kl_loss_coef,
            0.5);
  EXPECT_EQ(options([](auto& c) { c.algo.entropy_coef = 0.5; }).entropy_coef, 0.5);
  EXPECT_EQ(options([](auto& c) { c.algo.use_tis = true; }).mismatch.correction,
            MismatchCorrection::kTis);
  EXPECT_EQ(options([](auto& c) {
              c.algo.use_tis = true;
              c.algo.tis_clip = 5;
              c.algo.tis_clip_low = 0.5;
            }).mismatch.high,
            5.0);
  EXPECT_TRUE(options([](auto& c) { c.algo.use_rollout_logprobs = true; }).use_rollout_logprobs);
  EXPECT_EQ(options([](auto& c) { c.algo.use_opsm = true; }).opsm_delta, 1e-4);
  EXPECT_EQ(options([](auto& c) { c.algo.loss_aggregation = "token-mean"; }).aggregation,
            LossAggregation::kTokenMean);
  EXPECT_EQ(options([](auto&) {}).global_batch_size, 256);
  EXPECT_EQ(options([](auto& c) { c.rollout.rollout_max_response_len = 7; }).constant_length, 7);
}

TEST(PolicyLoss, MaskedTokensAreNotRead) {
  // Step puts NaN at masked tokens; an infinity at one more must not show either.
  Step step(8);
  std::size_t masked = 0;
  while (step.mask[masked] != 0) {
    ++masked;
  }
  step.logprobs[masked] = -std::numeric_limits<double>::infinity();
  for (const PolicyLossOptions& options : all_variants()) {
    const PolicyLossOutput out = step.run(options);
    EXPECT_TRUE(std::isfinite(out.stats.total_loss(options)));
    for (const double d : out.d_logprobs) {
      EXPECT_TRUE(std::isfinite(d));
    }
  }
}

TEST(PolicyLoss, HugeLogRatiosStayFinite) {
  Step step(8);
  step.logprobs[0] = -1e4;
  step.rollout_logprobs[0] = 1e4;
  for (const PolicyLossOptions& options : all_variants()) {
    const PolicyLossOutput out = step.run(options);
    EXPECT_TRUE(std::isfinite(out.stats.total_loss(options)));
  }
}

TEST(PolicyLoss, OnPolicyStepHasNoClippingAndNoMismatch) {
  Step step(4);
  step.logprobs = step.old_logprobs;
  step.rollout_logprobs = step.old_logprobs;
  const PolicyLossOptions options = with(kBase, [](auto& o) {
    o.mismatch = {MismatchCorrection::kTis, 0.0, 2.0};
  });
  const PolicyLossOutput out = step.run(options);
  EXPECT_EQ(out.stats.num_clipped, 0);
  EXPECT_EQ(out.stats.ppo_kl_sum, 0.0);
  EXPECT_EQ(out.stats.mismatch_abs_max, 0.0);
  EXPECT_EQ(out.stats.train_rollout_kl_sum, 0.0);
  EXPECT_EQ(out.stats.tis_sum, static_cast<double>(out.stats.num_tokens));
  const std::vector<double> weights = step.weights(options);
  for (std::size_t i = 0; i < step.num_samples(); ++i) {
    const auto t = usize(step.cu_seqlens[i]);  // the first token is never masked
    EXPECT_EQ(out.d_logprobs[t], -weights[i] * step.advantages[t]);
  }
}

TEST(PolicyLoss, RemovedSamplesDoNotReweightTheOthers) {
  const PolicyLossOptions options = with(kBase, [](auto& o) { o.global_batch_size = 3; });
  const auto weights = sample_weights(options, std::vector<std::int64_t>{4, 0, 2});
  EXPECT_EQ(weights, (std::vector<double>{1.0 / 12, 0.0, 1.0 / 6}));
  const auto token_mean =
      sample_weights(with(options, [](auto& o) { o.aggregation = LossAggregation::kTokenMean; }),
                     std::vector<std::int64_t>{0, 0});
  EXPECT_EQ(token_mean, (std::vector<double>{0.0, 0.0}));
}

TEST(PolicyLoss, FloatInputsAreComputedInDouble) {
  const std::vector<float> logprobs = {-1.0F, -2.0F};
  const std::vector<float> old = {-1.25F, -2.0F};
  const std::vector<double> advantages = {1.0, -1.0};
  const std::vector<std::uint8_t> mask = {1, 1};
  const std::vector<std::int64_t> cu = {0, 2};
  const std::vector<double> weights = {0.5};
  const auto out = policy_loss<float>({.logprobs = logprobs,
                                       .old_logprobs = old,
                                       .advantages = advantages,
                                       .mask = mask,
                                       .cu_seqlens = cu,
                                       .sample_weights = weights},
                                      with(kBase, [](auto& o) { o.ratio_high = 2.0; }));
  EXPECT_EQ(out.d_logprobs[0], -0.5 * std::exp(0.25));
  EXPECT_EQ(out.d_logprobs[1], 0.5);
  EXPECT_EQ(out.stats.num_mismatch_tokens, 0);  // not measured
}

}  // namespace
}  // namespace tandem
