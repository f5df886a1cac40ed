#include "rl/policy_loss.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem {
namespace {

/// A token's policy loss and its gradient by the log-prob.
struct TokenLoss {
  double value = 0.0;
  double gradient = 0.0;
  bool is_clipped = false;
  bool is_dual_clipped = false;
};

/// -min(rA, clip(r)A), for A < 0 at most -cA. `slope` is dr / d log-prob.
TokenLoss clipped_loss(double ratio, double slope, double advantage,
                       const PolicyLossOptions& options) {
  const double free = ratio * advantage;
  const double clipped = std::clamp(ratio, options.ratio_low, options.ratio_high) * advantage;
  TokenLoss loss{-free, -slope * advantage};
  if (clipped < free) {
    loss = {-clipped, 0.0, true};
  }
  if (options.dual_clip && advantage < 0.0) {
    const double bound = -*options.dual_clip * advantage;
    if (bound < loss.value) {
      loss = {bound, 0.0, loss.is_clipped, true};
    }
  }
  return loss;
}

/// -(4/tau) * sigmoid(tau (r - 1)) * A: a soft gate instead of a hard clip.
TokenLoss sapo_loss(double ratio, double slope, double advantage,
                    const PolicyLossOptions& options) {
  const double tau = advantage > 0.0 ? options.sapo_tau_positive : options.sapo_tau_negative;
  const double gate = 1.0 / (1.0 + std::exp(-tau * (ratio - 1.0)));
  return {-4.0 / tau * gate * advantage, -4.0 * gate * (1.0 - gate) * slope * advantage};
}

/// -clip(r) * A * log-prob with the weight held constant: no token loses its gradient.
TokenLoss cispo_loss(double ratio, double logprob, double advantage,
                     const PolicyLossOptions& options) {
  const double weight = std::clamp(ratio, options.ratio_low, options.ratio_high);
  return {-weight * advantage * logprob, -weight * advantage, weight != ratio};
}

TokenLoss token_loss(double log_ratio, double logprob, double advantage,
                     const PolicyLossOptions& options) {
  const double ratio = clamped_exp(log_ratio);
  const double slope = std::abs(log_ratio) <= kMaxLogRatio ? ratio : 0.0;
  switch (options.kind) {
    case PolicyLossKind::kPpoClip:
    case PolicyLossKind::kGspo:  // log_ratio is the sample's mean; straight through to the token
      return clipped_loss(ratio, slope, advantage, options);
    case PolicyLossKind::kCispo:
      return cispo_loss(ratio, logprob, advantage, options);
    case PolicyLossKind::kSapo:
      return sapo_loss(ratio, slope, advantage, options);
    case PolicyLossKind::kReinforce:
      return {-advantage * logprob, -advantage};
  }
  return {};
}

double masked_mean(std::span<const double> values, std::span<const std::uint8_t> mask) {
  double sum = 0.0;
  double count = 0.0;
  for (std::size_t t = 0; t < values.size(); ++t) {
    if (mask[t] != 0) {
      sum += values[t];
      count += 1.0;
    }
  }
  return count > 0.0 ? sum / count : 0.0;
}

/// The loss of one sample. All spans are that sample's; log-ratios are 0 where masked.
template <typename T>
class SampleLoss {
 public:
  SampleLoss(const PolicyLossInput<T>& in, const PolicyLossOptions& options, std::size_t sample,
             PolicyLossOutput& out)
      : in_(in),
        options_(options),
        weight_(in.sample_weights[sample]),
        begin_(usize(in.cu_seqlens[sample])),
        count_(usize(in.cu_seqlens[sample + 1]) - begin_),
        mask_(in.mask.subspan(begin_, count_)),
        out_(out) {}

  void run() {
    const std::vector<double> log_ratios = difference(
        in_.logprobs, options_.use_rollout_logprobs ? in_.rollout_logprobs : in_.old_logprobs);
    const std::vector<double> mismatch = in_.rollout_logprobs.empty()
                                             ? std::vector<double>(count_, 0.0)
                                             : difference(in_.old_logprobs, in_.rollout_logprobs);
    std::vector<double> weights(count_);
    mismatch_weights(mismatch, mask_, options_.mismatch, weights);
    const bool has_drifted = options_.opsm_delta && -mean_drift() > *options_.opsm_delta;
    const double mean_log_ratio = masked_mean(log_ratios, mask_);
    for (std::size_t t = 0; t < count_; ++t) {
      if (mask_[t] == 0) {
        continue;
      }
      add_policy_term(t, options_.kind == PolicyLossKind::kGspo ? mean_log_ratio : log_ratios[t],
                      weights[t], has_drifted);
      add_kl_term(t);
      add_entropy_term(t);
      add_mismatch_stats(mismatch[t], weights[t]);
      out_.stats.ppo_kl_sum += in_.old_logprobs.empty()
                                   ? -log_ratios[t]
                                   : value(in_.old_logprobs, t) - value(in_.logprobs, t);
      ++out_.stats.num_tokens;
    }
  }

 private:
  double value(std::span<const T> values, std::size_t t) const {
    return static_cast<double>(values[begin_ + t]);
  }

  std::vector<double> difference(std::span<const T> a, std::span<const T> b) const {
    std::vector<double> out(count_, 0.0);
    for (std::size_t t = 0; t < count_; ++t) {
      if (mask_[t] != 0) {
        out[t] = value(a, t) - value(b, t);
      }
    }
    return out;
  }

  /// mean(policy - old), where old is the rollout engine's log-prob when there is one.
  double mean_drift() const {
    const auto old = in_.rollout_logprobs.empty() ? in_.old_logprobs : in_.rollout_logprobs;
    return masked_mean(difference(in_.logprobs, old), mask_);
  }

  void add_policy_term(std::size_t t, double log_ratio, double mismatch_weight, bool has_drifted) {
    const double advantage = in_.advantages[begin_ + t];
    const TokenLoss loss = token_loss(log_ratio, value(in_.logprobs, t), advantage, options_);
    out_.stats.num_clipped += loss.is_clipped ? 1 : 0;
    out_.stats.num_dual_clipped += loss.is_dual_clipped ? 1 : 0;
    if (has_drifted && advantage < 0.0) {
      ++out_.stats.num_opsm_dropped;
      return;
    }
    const double scale = weight_ * mismatch_weight;
    out_.stats.pg_loss += scale * loss.value;
    out_.d_logprobs[begin_ + t] += scale * loss.gradient;
  }

  void add_kl_term(std::size_t t) {
    if (in_.ref_logprobs.empty()) {
      return;
    }
    const KlTerm kl =
        kl_term(options_.kl_kind, value(in_.logprobs, t) - value(in_.ref_logprobs, t));
    out_.stats.ref_kl_sum += kl.value;
    out_.stats.kl_loss += weight_ * kl.value;
    if (options_.kl_loss_coef != 0.0) {
      out_.d_logprobs[begin_ + t] += weight_ * options_.kl_loss_coef * kl.gradient;
    }
  }

  void add_entropy_term(std::size_t t) {
    if (in_.entropy.empty()) {
      return;
    }
    out_.stats.entropy_sum += value(in_.entropy, t);
    out_.stats.entropy_loss += weight_ * value(in_.entropy, t);
    if (options_.entropy_coef != 0.0) {
      out_.d_entropy[begin_ + t] = -weight_ * options_.entropy_coef;
    }
  }

  void add_mismatch_stats(double log_ratio, double weight) {
    if (in_.rollout_logprobs.empty()) {
      return;
    }
    PolicyLossStats& stats = out_.stats;
    const double ratio = clamped_exp(log_ratio);
    ++stats.num_mismatch_tokens;
    stats.mismatch_abs_sum += std::abs(log_ratio);
    stats.mismatch_abs_max = std::max(stats.mismatch_abs_max, std::abs(log_ratio));
    stats.train_rollout_kl_sum += mismatch_k3(log_ratio);
    stats.ratio_sum += ratio;
    stats.ratio_abs_sum += std::abs(ratio - 1.0);
    stats.tis_sum += weight;
    stats.tis_square_sum += weight * weight;
    const bool is_token_level = options_.mismatch.correction == MismatchCorrection::kTis ||
                                options_.mismatch.correction == MismatchCorrection::kIcePop;
    stats.num_tis_clipped += is_token_level && weight != ratio ? 1 : 0;
  }

  const PolicyLossInput<T>& in_;
  const PolicyLossOptions& options_;
  double weight_;
  std::size_t begin_;
  std::size_t count_;
  std::span<const std::uint8_t> mask_;
  PolicyLossOutput& out_;
};

template <typename T>
void check_input(const PolicyLossInput<T>& in, const PolicyLossOptions& options) {
  const std::size_t num_tokens = in.logprobs.size();
  const auto full_or_empty = [num_tokens](const auto& span, bool is_needed) {
    return span.size() == num_tokens || (!is_needed && span.empty());
  };
  const bool needs_rollout =
      options.use_rollout_logprobs || options.mismatch.correction != MismatchCorrection::kNone;
  const bool needs_old = !options.use_rollout_logprobs || !in.rollout_logprobs.empty();
  TDM_CHECK(full_or_empty(in.old_logprobs, needs_old), in.old_logprobs.size(), num_tokens);
  TDM_CHECK(full_or_empty(in.rollout_logprobs, needs_rollout), in.rollout_logprobs.size());
  TDM_CHECK(full_or_empty(in.ref_logprobs, options.kl_loss_coef != 0.0), in.ref_logprobs.size());
  TDM_CHECK(full_or_empty(in.entropy, options.entropy_coef != 0.0), in.entropy.size());
  TDM_CHECK(full_or_empty(in.advantages, true), in.advantages.size(), num_tokens);
  TDM_CHECK(full_or_empty(in.mask, true), in.mask.size(), num_tokens);
  TDM_CHECK(in.cu_seqlens.size() == in.sample_weights.size() + 1, in.cu_seqlens.size());
  TDM_CHECK(in.cu_seqlens.front() == 0 && in.cu_seqlens.back() == isize(in.logprobs));
}

}  // namespace

std::vector<double> sample_weights(const PolicyLossOptions& options,
                                   std::span<const std::int64_t> num_trainable) {
  std::int64_t total = 0;
  for (const std::int64_t count : num_trainable) {
    TDM_CHECK(count >= 0, count);
    total += count;
  }
  const auto batch_size = static_cast<double>(options.global_batch_size);
  const auto weight = [&](std::int64_t count) {
    switch (options.aggregation) {
      case LossAggregation::kTokenMean:
        return 1.0 / static_cast<double>(total);
      case LossAggregation::kSeqMeanTokenMean:
        return 1.0 / (batch_size * static_cast<double>(count));
      case LossAggregation::kSeqMeanTokenSum:
        return 1.0 / batch_size;
      case LossAggregation::kConstant:
        return 1.0 / (batch_size * static_cast<double>(options.constant_length));
    }
    return 0.0;
  };
  std::vector<double> weights;
  weights.reserve(num_trainable.size());
  for (const std::int64_t count : num_trainable) {
    weights.push_back(count == 0 ? 0.0 : weight(count));
  }
  return weights;
}

KlTerm kl_term(KlKind kind, double log_ratio) {
  switch (kind) {
    case KlKind::kK1:
      return {log_ratio, 1.0};
    case KlKind::kK2:
      return {0.5 * log_ratio * log_ratio, log_ratio};
    case KlKind::kK3:
      return {std::expm1(-log_ratio) + log_ratio, -std::expm1(-log_ratio)};
    case KlKind::kLowVarKl: {
      // x within +-20, the value at most 10 (k3 is never negative); flat beyond either bound.
      const double x = std::clamp(log_ratio, -kMaxLogRatio, kMaxLogRatio);
      const double k3 = std::expm1(-x) + x;
      const bool is_free = x == log_ratio && k3 <= 10.0;
      return {std::min(k3, 10.0), is_free ? -std::expm1(-x) : 0.0};
    }
  }
  return {};
}

void PolicyLossStats::add(const PolicyLossStats& other) {
  pg_loss += other.pg_loss;
  kl_loss += other.kl_loss;
  entropy_loss += other.entropy_loss;
  num_tokens += other.num_tokens;
  num_clipped += other.num_clipped;
  num_dual_clipped += other.num_dual_clipped;
  num_opsm_dropped += other.num_opsm_dropped;
  ppo_kl_sum += other.ppo_kl_sum;
  ref_kl_sum += other.ref_kl_sum;
  entropy_sum += other.entropy_sum;
  num_mismatch_tokens += other.num_mismatch_tokens;
  mismatch_abs_sum += other.mismatch_abs_sum;
  mismatch_abs_max = std::max(mismatch_abs_max, other.mismatch_abs_max);
  train_rollout_kl_sum += other.train_rollout_kl_sum;
  ratio_sum += other.ratio_sum;
  ratio_abs_sum += other.ratio_abs_sum;
  tis_sum += other.tis_sum;
  tis_square_sum += other.tis_square_sum;
  num_tis_clipped += other.num_tis_clipped;
}

double PolicyLossStats::total_loss(const PolicyLossOptions& options) const {
  return pg_loss + options.kl_loss_coef * kl_loss - options.entropy_coef * entropy_loss;
}

template <typename T>
PolicyLossOutput policy_loss(const PolicyLossInput<T>& input, const PolicyLossOptions& options) {
  check_input(input, options);
  PolicyLossOutput output;
  output.d_logprobs.assign(input.logprobs.size(), 0.0);
  output.d_entropy.assign(options.entropy_coef != 0.0 ? input.logprobs.size() : 0, 0.0);
  for (std::size_t i = 0; i < input.sample_weights.size(); ++i) {
    SampleLoss<T>(input, options, i, output).run();
  }
  return output;
}

template PolicyLossOutput policy_loss<float>(const PolicyLossInput<float>&,
                                             const PolicyLossOptions&);
template PolicyLossOutput policy_loss<double>(const PolicyLossInput<double>&,
                                              const PolicyLossOptions&);

}  // namespace tandem
