// policy_loss.h — the policy-gradient losses as plain numbers: value, statistics and the gradient
// with respect to each token's log-prob. Knows no tensors; the trainer feeds d_logprobs into the
// model's backward.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/error.h"
#include "rl/advantage.h"
#include "rl/mismatch.h"
#include "train/config.h"

namespace tandem {

enum class PolicyLossKind { kPpoClip, kGspo, kCispo, kSapo, kReinforce };
enum class KlKind { kK1, kK2, kK3, kLowVarKl };
enum class LossAggregation { kTokenMean, kSeqMeanTokenMean, kSeqMeanTokenSum, kConstant };

/// Bounds are absolute numbers on the ratio: eps_clip 0.2 / eps_clip_high 0.28 are 0.8 and 1.28.
struct PolicyLossOptions {
  PolicyLossKind kind = PolicyLossKind::kPpoClip;
  double ratio_low = 0.8;
  double ratio_high = 1.2;
  std::optional<double> dual_clip = std::nullopt;  ///< c > 1: for A < 0 the loss is at most -cA
  double sapo_tau_positive = 1.0;
  double sapo_tau_negative = 1.05;
  KlKind kl_kind = KlKind::kLowVarKl;
  double kl_loss_coef = 0.0;
  double entropy_coef = 0.0;
  MismatchOptions mismatch = {};
  bool use_rollout_logprobs = false;  ///< the ratio is policy / rollout engine
  /// Drop tokens with A < 0 of samples whose mean(old - policy) exceeds this.
  std::optional<double> opsm_delta = std::nullopt;
  LossAggregation aggregation = LossAggregation::kSeqMeanTokenMean;
  /// N of the sequence means: a constant, also when samples were removed.
  std::int64_t global_batch_size = 1;
  /// L_max of kConstant: a constant, never a batch's padded width.
  std::int64_t constant_length = 1;
};

/// The options a run's config asks for. The config must be derived and valid.
[[nodiscard]] PolicyLossOptions policy_loss_options(const RlConfig& config);
[[nodiscard]] AdvantageOptions advantage_options(const RlConfig& config);

/// The factor of each sample's token losses, so that the step's loss is sum_i weight_i sum_t m_it
/// l_it. Call it once per optimizer step with every sample's number of trainable tokens, before the
/// first micro-batch: no micro-batch may divide by anything of its own. A sample without trainable
/// tokens has weight 0. Shapes: num_trainable and result [samples of the step].
[[nodiscard]] std::vector<double> sample_weights(const PolicyLossOptions& options,
                                                 std::span<const std::int64_t> num_trainable);

struct KlTerm {
  double value = 0.0;
  double gradient = 0.0;  ///< d value / d log_ratio
};
/// KL estimator at one token, log_ratio = policy - reference log-prob.
[[nodiscard]] KlTerm kl_term(KlKind kind, double log_ratio);

/// One micro-batch of whole samples, packed. Shapes: per token [T]; cu_seqlens [B+1];
/// sample_weights [B]. Spans that an option does not need may be empty; without rollout_logprobs
/// the mismatch is not measured. Values where mask is 0 are never read into the arithmetic and may
/// be NaN. Corrections that drop tokens only clear the mask here; the weights keep their
/// denominators.
template <typename T>
struct PolicyLossInput {
  std::span<const T> logprobs = {};
  std::span<const T> old_logprobs = {};
  std::span<const T> rollout_logprobs = {};
  std::span<const T> ref_logprobs = {};
  std::span<const T> entropy = {};
  std::span<const double> advantages = {};
  std::span<const std::uint8_t> mask = {};
  std::span<const std::int64_t> cu_seqlens = {};
  std::span<const double> sample_weights = {};
};

/// Sums over trainable tokens. add() joins micro-batches; divide only at the end.
struct PolicyLossStats {
  double pg_loss = 0.0;       ///< as aggregated for the gradient, before coefficients
  double kl_loss = 0.0;       ///< same
  double entropy_loss = 0.0;  ///< aggregated entropy (the bonus subtracts entropy_coef times it)
  std::int64_t num_tokens = 0;
  std::int64_t num_clipped = 0;
  std::int64_t num_dual_clipped = 0;
  std::int64_t num_opsm_dropped = 0;
  double ppo_kl_sum = 0.0;  ///< old - policy
  double ref_kl_sum = 0.0;
  double entropy_sum = 0.0;
  std::int64_t num_mismatch_tokens = 0;  ///< tokens with a rollout log-prob; 0 = not measured
  double mismatch_abs_sum = 0.0;
  double mismatch_abs_max = 0.0;
  double train_rollout_kl_sum = 0.0;
  double ratio_sum = 0.0;  ///< old / rollout, before clamping ("ois")
  double ratio_abs_sum = 0.0;
  double tis_sum = 0.0;
  double tis_square_sum = 0.0;
  std::int64_t num_tis_clipped = 0;

  void add(const PolicyLossStats& other);
  [[nodiscard]] double total_loss(const PolicyLossOptions& options) const;
};

/// Shapes: d_logprobs [T]; d_entropy [T], empty when entropy_coef is 0.
struct PolicyLossOutput {
  std::vector<double> d_logprobs;
  std::vector<double> d_entropy;
  PolicyLossStats stats;
};

/// Determinism: each token's gradient is a function of its own sample, so any cut into
/// micro-batches gives the same bits; sums differ by rounding only. Float or double in, double
/// inside. Errors: TDM_CHECK on shapes and on a missing span that an option needs.
template <typename T>
[[nodiscard]] PolicyLossOutput policy_loss(const PolicyLossInput<T>& input,
                                           const PolicyLossOptions& options);

extern template PolicyLossOutput policy_loss<float>(const PolicyLossInput<float>&,
                                                    const PolicyLossOptions&);
extern template PolicyLossOutput policy_loss<double>(const PolicyLossInput<double>&,
                                                     const PolicyLossOptions&);

}  // namespace tandem
