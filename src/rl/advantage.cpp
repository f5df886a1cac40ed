#include "rl/advantage.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem {
namespace {

bool counts(double reward, std::uint8_t removed) {
  return removed == 0 && std::isfinite(reward);
}

std::vector<double> counted_rewards(std::span<const double> rewards,
                                    std::span<const std::uint8_t> removed) {
  TDM_CHECK(rewards.size() == removed.size(), rewards.size(), removed.size());
  std::vector<double> kept;
  for (std::size_t i = 0; i < rewards.size(); ++i) {
    if (counts(rewards[i], removed[i])) {
      kept.push_back(rewards[i]);
    }
  }
  return kept;
}

/// REINFORCE++ returns of one sample: reward at the last trainable token, -beta*k1 on each, summed
/// from the right.
void reinforce_returns(std::span<double> out, std::span<const std::uint8_t> mask,
                       std::span<const double> kl, double reward, const AdvantageOptions& options) {
  double running = 0.0;
  bool is_last = true;
  for (std::size_t t = out.size(); t-- > 0;) {
    if (mask[t] == 0) {
      continue;
    }
    const double shaped = kl.empty() ? 0.0 : -options.kl_coef * kl[t];
    running = shaped + (is_last ? reward : 0.0) + options.gamma * running;
    is_last = false;
    out[t] = running;
  }
}

/// Spreads a sample's advantage over its trainable tokens, minus beta*k1 where that estimator asks
/// for it.
void spread(std::span<double> out, std::span<const std::uint8_t> mask, std::span<const double> kl,
            double advantage, double kl_coef) {
  for (std::size_t t = 0; t < out.size(); ++t) {
    if (mask[t] != 0) {
      out[t] = advantage - (kl.empty() ? 0.0 : kl_coef * kl[t]);
    }
  }
}

void check_shapes(const AdvantageInput& in, const AdvantageOptions& options) {
  const std::size_t num_samples = in.rewards.size();
  TDM_CHECK(in.group_ids.size() == num_samples, in.group_ids.size(), num_samples);
  TDM_CHECK(in.removed.size() == num_samples, in.removed.size(), num_samples);
  TDM_CHECK(in.cu_seqlens.size() == num_samples + 1, in.cu_seqlens.size(), num_samples);
  TDM_CHECK(in.cu_seqlens.front() == 0 && in.cu_seqlens.back() == isize(in.mask));
  TDM_CHECK(options.kl_coef == 0.0 || in.kl.size() == in.mask.size(), in.kl.size());
}

/// The sample-level advantages, group by group.
std::vector<double> per_sample_advantages(const AdvantageInput& in,
                                          const AdvantageOptions& options) {
  std::map<std::int64_t, std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < in.group_ids.size(); ++i) {
    groups[in.group_ids[i]].push_back(i);
  }
  std::vector<double> advantages(in.rewards.size(), 0.0);
  for (const auto& [id, members] : groups) {
    std::vector<double> rewards;
    std::vector<std::uint8_t> removed;
    for (const std::size_t i : members) {
      rewards.push_back(in.rewards[i]);
      removed.push_back(in.removed[i]);
    }
    const std::vector<double> group = group_advantages(rewards, removed, options);
    for (std::size_t k = 0; k < members.size(); ++k) {
      advantages[members[k]] = group[k];
    }
  }
  return advantages;
}

}  // namespace

MeanStd mean_std(std::span<const double> values) {
  if (values.empty()) {
    return {};
  }
  const auto is_same = [&](double value) { return value == values[0]; };
  if (std::all_of(values.begin(), values.end(), is_same)) {
    return {values[0], 0.0};  // exact, where the sum below would leave rounding noise
  }
  const auto count = static_cast<double>(values.size());
  double sum = 0.0;
  for (const double value : values) {
    sum += value;
  }
  const double mean = sum / count;
  double squares = 0.0;
  for (const double value : values) {
    squares += (value - mean) * (value - mean);
  }
  return {mean, std::sqrt(squares / (count - 1.0))};
}

std::vector<double> group_advantages(std::span<const double> rewards,
                                     std::span<const std::uint8_t> removed,
                                     const AdvantageOptions& options) {
  const std::vector<double> kept = counted_rewards(rewards, removed);
  std::vector<double> advantages(rewards.size(), 0.0);
  const bool is_raw =
      options.estimator == AdvantageEstimator::kReinforcePlusPlus ||
      (!options.rewards_normalization && options.estimator != AdvantageEstimator::kRloo);
  if (!is_raw && kept.size() < 2) {
    return advantages;
  }
  const MeanStd stats = mean_std(kept);
  const auto count = static_cast<double>(kept.size());
  for (std::size_t i = 0; i < rewards.size(); ++i) {
    if (!counts(rewards[i], removed[i])) {
      continue;
    }
    if (is_raw) {
      advantages[i] = rewards[i];
    } else if (stats.std <= kStdThreshold) {
      advantages[i] = 0.0;
    } else if (options.estimator == AdvantageEstimator::kRloo) {
      advantages[i] = count / (count - 1.0) * (rewards[i] - stats.mean);
    } else if (options.estimator == AdvantageEstimator::kGrpo && options.std_normalization) {
      advantages[i] = (rewards[i] - stats.mean) / (stats.std + kStdEpsilon);
    } else {
      advantages[i] = rewards[i] - stats.mean;
    }
  }
  return advantages;
}

AdvantageOutput compute_advantages(const AdvantageInput& input, const AdvantageOptions& options) {
  check_shapes(input, options);
  AdvantageOutput output;
  output.per_sample = per_sample_advantages(input, options);
  output.per_token.assign(input.mask.size(), 0.0);
  const bool uses_kl = options.kl_coef != 0.0 && options.estimator != AdvantageEstimator::kGrpo &&
                       options.estimator != AdvantageEstimator::kRloo;
  // Removed samples are no tokens of the batch: neither trained nor part of the whitening.
  std::vector<std::uint8_t> mask(input.mask.begin(), input.mask.end());
  for (std::size_t i = 0; i < input.rewards.size(); ++i) {
    const std::size_t begin = usize(input.cu_seqlens[i]);
    const std::size_t count = usize(input.cu_seqlens[i + 1] - input.cu_seqlens[i]);
    const bool is_finite = std::isfinite(input.rewards[i]);
    output.num_nonfinite_rewards += is_finite ? 0 : 1;
    if (input.removed[i] != 0 || !is_finite) {
      std::fill_n(mask.begin() + input.cu_seqlens[i], count, std::uint8_t{0});
      continue;
    }
    const auto tokens = std::span(output.per_token).subspan(begin, count);
    const auto sample_mask = std::span<const std::uint8_t>(mask).subspan(begin, count);
    const auto kl = uses_kl ? input.kl.subspan(begin, count) : std::span<const double>{};
    if (options.estimator == AdvantageEstimator::kReinforcePlusPlus) {
      reinforce_returns(tokens, sample_mask, kl, output.per_sample[i], options);
    } else {
      spread(tokens, sample_mask, kl, output.per_sample[i], options.kl_coef);
    }
  }
  if (options.normalize_advantages) {
    whiten(output.per_token, mask);
  }
  return output;
}

void whiten(std::span<double> values, std::span<const std::uint8_t> mask) {
  TDM_CHECK(values.size() == mask.size(), values.size(), mask.size());
  std::vector<double> kept;
  for (std::size_t t = 0; t < values.size(); ++t) {
    if (mask[t] != 0) {
      kept.push_back(values[t]);
    }
  }
  const MeanStd stats = mean_std(kept);
  const double scale = 1.0 / std::sqrt(stats.std * stats.std + kWhitenEpsilon);
  for (std::size_t t = 0; t < values.size(); ++t) {
    values[t] = mask[t] != 0 ? (values[t] - stats.mean) * scale : 0.0;
  }
}

GaeOutput gae(std::span<const double> rewards, std::span<const double> values,
              std::span<const std::uint8_t> mask, double gamma, double lambda) {
  TDM_CHECK(rewards.size() == values.size() && rewards.size() == mask.size(), rewards.size());
  GaeOutput out{std::vector<double>(rewards.size(), 0.0), std::vector<double>(rewards.size(), 0.0)};
  double next_value = 0.0;
  double next_advantage = 0.0;
  for (std::size_t t = rewards.size(); t-- > 0;) {
    if (mask[t] == 0) {
      continue;
    }
    const double delta = rewards[t] + gamma * next_value - values[t];
    next_advantage = delta + gamma * lambda * next_advantage;
    next_value = values[t];
    out.advantages[t] = next_advantage;
    out.returns[t] = next_advantage + values[t];
  }
  return out;
}

double overlong_penalty(std::int64_t len, std::int64_t max_len, std::int64_t cache_len) {
  TDM_CHECK(cache_len > 0 && cache_len <= max_len, cache_len, max_len);
  const std::int64_t over = len - (max_len - cache_len);
  const double share = static_cast<double>(over) / static_cast<double>(cache_len);
  return -std::clamp(share, 0.0, 1.0) + 0.0;  // + 0.0 turns -0 into 0
}

Expected<GroupFilter> parse_group_filter(std::string_view name) {
  if (name == "none" || name.empty()) {
    return GroupFilter::kNone;
  }
  if (name == "check_reward_nonzero_std") {
    return GroupFilter::kRewardNonzeroStd;
  }
  return fail("dynamic_sampling_filter: expected none or check_reward_nonzero_std, got '{}'", name);
}

std::string_view to_string(FilterVerdict verdict) {
  switch (verdict) {
    case FilterVerdict::kKeep:
      return "keep";
    case FilterVerdict::kZeroStd:
      return "zero_std";
    case FilterVerdict::kTooFewSamples:
      return "too_few_samples";
  }
  return "";
}

FilterVerdict filter_group(GroupFilter filter, std::span<const double> rewards,
                           std::span<const std::uint8_t> removed) {
  if (filter == GroupFilter::kNone) {
    return FilterVerdict::kKeep;
  }
  const std::vector<double> kept = counted_rewards(rewards, removed);
  if (kept.size() < 2) {
    return FilterVerdict::kTooFewSamples;
  }
  return mean_std(kept).std > kStdThreshold ? FilterVerdict::kKeep : FilterVerdict::kZeroStd;
}

}  // namespace tandem
