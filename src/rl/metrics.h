// metrics.h — figures of a step: typed reductions, the names people know, and metrics.jsonl. A
// figure that was not measured is null, never 0.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "rl/policy_loss.h"

namespace tandem {

/// By name; nullopt = not measured.
using MetricMap = std::map<std::string, std::optional<double>, std::less<>>;

/// Metrics whose parts come from many samples, micro-batches or ranks. Each name has one kind of
/// reduction; merging two sets joins sums with counts, so a mean of means cannot happen.
class MetricSet {
 public:
  void add_mean(std::string_view name, double sum, double count = 1.0);
  void add_sum(std::string_view name, double value);
  void add_min(std::string_view name, double value);
  void add_max(std::string_view name, double value);
  void merge(const MetricSet& other);

  /// nullopt when nothing was added (or the count is 0).
  [[nodiscard]] std::optional<double> value(std::string_view name) const;
  [[nodiscard]] MetricMap values() const;

 private:
  enum class Kind { kMean, kSum, kMin, kMax };
  struct Cell {
    Kind kind = Kind::kSum;
    double value = 0.0;
    double count = 0.0;
  };
  void join(std::string_view name, const Cell& cell);
  static std::optional<double> result(const Cell& cell);

  std::map<std::string, Cell, std::less<>> cells_;
};

/// One line of metrics.jsonl. Means are over the step's samples or trainable tokens; `extra` holds
/// the long names (rollout/..., train/..., perf/..., eval/...).
struct StepMetrics {
  std::int64_t step = 0;
  std::optional<double> reward_mean;    ///< training samples, before normalisation and filtering
  std::optional<double> eval_accuracy;  ///< held-out, sampled at eval_temperature
  std::optional<double> eval_accuracy_greedy;  ///< held-out, greedy
  std::optional<double> logprob_mismatch_max;  ///< max |old - rollout log-prob|
  std::optional<double> train_rollout_kl;
  std::optional<double> entropy;    ///< nats a token
  std::optional<double> grad_norm;  ///< before clipping
  std::optional<double> lr;
  std::optional<double> response_tokens_mean;
  std::optional<double> truncated_fraction;
  std::optional<double> rollout_tokens_per_s;  ///< generated tokens
  std::optional<double> train_tokens_per_s;    ///< prompt + response tokens
  std::optional<double> time_rollout_s;
  std::optional<double> time_train_s;
  std::optional<double> time_total_s;
  MetricMap extra;

  template <typename Self, typename Visitor>
  static void visit_fields(Self& self, Visitor&& visit) {
    visit("reward_mean", self.reward_mean);
    visit("eval_accuracy", self.eval_accuracy);
    visit("eval_accuracy_greedy", self.eval_accuracy_greedy);
    visit("logprob_mismatch_max", self.logprob_mismatch_max);
    visit("train_rollout_kl", self.train_rollout_kl);
    visit("entropy", self.entropy);
    visit("grad_norm", self.grad_norm);
    visit("lr", self.lr);
    visit("response_tokens_mean", self.response_tokens_mean);
    visit("truncated_fraction", self.truncated_fraction);
    visit("rollout_tokens_per_s", self.rollout_tokens_per_s);
    visit("train_tokens_per_s", self.train_tokens_per_s);
    visit("time_rollout_s", self.time_rollout_s);
    visit("time_train_s", self.time_train_s);
    visit("time_total_s", self.time_total_s);
  }
};

/// One JSON object without a newline. Numbers read back to the same bits; NaN and Inf become null.
[[nodiscard]] std::string to_json_line(const StepMetrics& metrics);

/// Errors: a Failure that says what the line lacks.
[[nodiscard]] Expected<StepMetrics> parse_json_line(std::string_view line);

/// What the metrics need to know of one sample.
struct SampleOutcome {
  std::int64_t group_id = 0;
  double reward = 0.0;
  std::int64_t response_tokens = 0;
  bool is_truncated = false;
  bool is_removed = false;  ///< left out of every figure but rollout/removed_ratio
};

/// rollout/raw_reward, response_len/{mean,median,max,min}, truncated_ratio, removed_ratio,
/// zero_std/{all_zero,all_one}_percentage (shares of groups, 0..1) and passrate/pass@k for k = 1,
/// 2, 4, ... up to the group size; a reward of 1 or more counts as solved.
[[nodiscard]] MetricMap rollout_metrics(std::span<const SampleOutcome> samples);

/// The train/... figures of a step, and the short names of StepMetrics that come from the loss.
[[nodiscard]] MetricMap train_metrics(const PolicyLossStats& stats,
                                      const PolicyLossOptions& options);
void set_loss_metrics(StepMetrics& metrics, const PolicyLossStats& stats,
                      const PolicyLossOptions& options);

/// 1 - prod_{j<k} (n-c-j)/(n-j): the chance that k of n samples, c of them correct, contain a
/// correct one; 1 <= k <= n.
[[nodiscard]] double pass_at_k(std::int64_t n, std::int64_t c, std::int64_t k);

/// Natural-log softmax of logits / temperature, and its entropy in nats. temperature > 0.
[[nodiscard]] std::vector<double> log_softmax(std::span<const double> logits, double temperature);
[[nodiscard]] double entropy(std::span<const double> logits, double temperature);

}  // namespace tandem
