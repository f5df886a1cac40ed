// advantage.h — from rewards to advantages: group baselines, REINFORCE++ returns, whitening, and
// the filter that drops groups without spread. All arithmetic in double.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace tandem {

/// kGrpo also serves gspo, cispo and reinforce, whose difference is the loss.
enum class AdvantageEstimator { kGrpo, kRloo, kReinforcePlusPlus, kReinforcePlusPlusBaseline };

struct AdvantageOptions {
  AdvantageEstimator estimator = AdvantageEstimator::kGrpo;
  bool std_normalization = true;      ///< GRPO; false = Dr.GRPO
  bool rewards_normalization = true;  ///< false = raw rewards as advantages (not RLOO)
  bool normalize_advantages = false;  ///< whiten over all trainable tokens of the batch
  double kl_coef = 0.0;               ///< beta of the REINFORCE++ estimators
  double gamma = 1.0;                 ///< REINFORCE++ only
};

/// Equal rewards such as 0.1 * n have a computed std around 1e-9; below this a group has no spread.
inline constexpr double kStdThreshold = 1e-8;
/// Added to the std before dividing.
inline constexpr double kStdEpsilon = 1e-6;
/// Added to the variance in whitening.
inline constexpr double kWhitenEpsilon = 1e-8;

struct MeanStd {
  double mean = 0.0;
  /// n-1 in the denominator; 0 for fewer than two values; exactly 0 when all are equal.
  double std = 0.0;
};
[[nodiscard]] MeanStd mean_std(std::span<const double> values);

/// Advantages of one group. A removed sample, or one whose reward is not finite, is left out of
/// mean and std and gets 0; with fewer than two samples left nobody gets an advantage. Shapes:
/// rewards, removed [n].
[[nodiscard]] std::vector<double> group_advantages(std::span<const double> rewards,
                                                   std::span<const std::uint8_t> removed,
                                                   const AdvantageOptions& options);

/// A whole rollout, packed. Shapes: rewards, group_ids, removed [N]; cu_seqlens [N+1] into the
/// response tokens; mask (1 = trainable) and kl [T]. kl is k1 = old - ref log-prob, may be empty
/// when kl_coef is 0.
struct AdvantageInput {
  std::span<const double> rewards = {};
  std::span<const std::int64_t> group_ids = {};
  std::span<const std::uint8_t> removed = {};
  std::span<const std::int64_t> cu_seqlens = {};
  std::span<const std::uint8_t> mask = {};
  std::span<const double> kl = {};
};

/// Shapes: per_sample [N] before any token-level work; per_token [T], 0 where not trainable.
struct AdvantageOutput {
  std::vector<double> per_sample;
  std::vector<double> per_token;
  std::int64_t num_nonfinite_rewards = 0;
};

/// Samples of a group need not be neighbours. Errors: TDM_CHECK on shapes that disagree.
[[nodiscard]] AdvantageOutput compute_advantages(const AdvantageInput& input,
                                                 const AdvantageOptions& options);

/// a' = (a - mean) / sqrt(var + 1e-8) over the tokens with mask 1, var with n-1; other tokens
/// become 0. Two passes.
void whiten(std::span<double> values, std::span<const std::uint8_t> mask);

/// GAE over trainable tokens only (the others are skipped, not stepped through); the value after
/// the last is 0. Shapes: rewards, values, mask [T] of one sample; result advantages and returns
/// [T], 0 where masked.
struct GaeOutput {
  std::vector<double> advantages;
  std::vector<double> returns;
};
[[nodiscard]] GaeOutput gae(std::span<const double> rewards, std::span<const double> values,
                            std::span<const std::uint8_t> mask, double gamma, double lambda);

/// DAPO's soft penalty: 0 up to max_len - cache_len, then linear, -1 from max_len on.
[[nodiscard]] double overlong_penalty(std::int64_t len, std::int64_t max_len,
                                      std::int64_t cache_len);

/// `dynamic_sampling_filter`.
enum class GroupFilter { kNone, kRewardNonzeroStd };
[[nodiscard]] Expected<GroupFilter> parse_group_filter(std::string_view name);

enum class FilterVerdict { kKeep, kZeroStd, kTooFewSamples };
/// The `<reason>` of the metric dynamic_filter/drop_<reason>.
[[nodiscard]] std::string_view to_string(FilterVerdict verdict);

/// Keeps a group when the std of its (not removed) rewards is above kStdThreshold.
[[nodiscard]] FilterVerdict filter_group(GroupFilter filter, std::span<const double> rewards,
                                         std::span<const std::uint8_t> removed);

}  // namespace tandem
