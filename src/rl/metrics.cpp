#include "rl/metrics.h"

#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? Json(*value) : Json(nullptr);
}

Expected<std::optional<double>> number_or_null(const Json& value, std::string_view name) {
  if (value.is_null()) {
    return std::optional<double>{};
  }
  if (!value.is_number()) {
    return fail("metrics line: '{}': expected a number or null", name);
  }
  return std::optional<double>(value.get<double>());
}

/// A mean that was not measured stays null.
std::optional<double> ratio(double sum, std::int64_t count) {
  return count > 0 ? std::optional(sum / static_cast<double>(count)) : std::nullopt;
}

struct GroupTally {
  std::int64_t count = 0;
  std::int64_t solved = 0;
  double min_reward = 0.0;
  double max_reward = 0.0;
};

std::map<std::int64_t, GroupTally> tally_groups(std::span<const SampleOutcome> samples) {
  std::map<std::int64_t, GroupTally> groups;
  for (const SampleOutcome& sample : samples) {
    if (sample.is_removed) {
      continue;
    }
    GroupTally& group = groups[sample.group_id];
    const bool is_first = group.count == 0;
    group.min_reward = is_first ? sample.reward : std::min(group.min_reward, sample.reward);
    group.max_reward = is_first ? sample.reward : std::max(group.max_reward, sample.reward);
    group.solved += sample.reward >= 1.0 ? 1 : 0;
    ++group.count;
  }
  return groups;
}

void add_group_metrics(MetricSet& set, std::span<const SampleOutcome> samples) {
  for (const auto& [id, group] : tally_groups(samples)) {
    const bool has_spread = group.max_reward - group.min_reward > kStdThreshold;
    set.add_mean("rollout/zero_std/all_zero_percentage",
                 !has_spread && group.max_reward == 0.0 ? 1.0 : 0.0);
    set.add_mean("rollout/zero_std/all_one_percentage",
                 !has_spread && group.max_reward == 1.0 ? 1.0 : 0.0);
    for (std::int64_t k = 1; k <= group.count; k *= 2) {
      set.add_mean(fmt::format("passrate/pass@{}", k), pass_at_k(group.count, group.solved, k));
    }
  }
}

}  // namespace

void MetricSet::join(std::string_view name, const Cell& cell) {
  const auto it = cells_.find(name);
  if (it == cells_.end()) {
    cells_.emplace(name, cell);
    return;
  }
  Cell& mine = it->second;
  TDM_CHECK(mine.kind == cell.kind, name);
  mine.count += cell.count;
  switch (cell.kind) {
    case Kind::kMean:
    case Kind::kSum:
      mine.value += cell.value;
      break;
    case Kind::kMin:
      mine.value = std::min(mine.value, cell.value);
      break;
    case Kind::kMax:
      mine.value = std::max(mine.value, cell.value);
      break;
  }
}

std::optional<double> MetricSet::result(const Cell& cell) {
  if (cell.kind != Kind::kMean) {
    return cell.value;
  }
  return cell.count > 0.0 ? std::optional(cell.value / cell.count) : std::nullopt;
}

void MetricSet::add_mean(std::string_view name, double sum, double count) {
  join(name, {Kind::kMean, sum, count});
}
void MetricSet::add_sum(std::string_view name, double value) {
  join(name, {Kind::kSum, value, 1});
}
void MetricSet::add_min(std::string_view name, double value) {
  join(name, {Kind::kMin, value, 1});
}
void MetricSet::add_max(std::string_view name, double value) {
  join(name, {Kind::kMax, value, 1});
}

void MetricSet::merge(const MetricSet& other) {
  for (const auto& [name, cell] : other.cells_) {
    join(name, cell);
  }
}

std::optional<double> MetricSet::value(std::string_view name) const {
  const auto it = cells_.find(name);
  return it == cells_.end() ? std::nullopt : result(it->second);
}

MetricMap MetricSet::values() const {
  MetricMap map;
  for (const auto& [name, cell] : cells_) {
    map[name] = result(cell);
  }
  return map;
}

std::string to_json_line(const StepMetrics& metrics) {
  Json line;
  line["step"] = metrics.step;
  StepMetrics::visit_fields(metrics, [&line](const char* name, const std::optional<double>& value) {
    line[name] = to_json(value);
  });
  for (const auto& [name, value] : metrics.extra) {
    line[name] = to_json(value);
  }
  return line.dump();
}

Expected<StepMetrics> parse_json_line(std::string_view text) {
  const Json line = Json::parse(text, nullptr, false);
  if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer()) {
    return fail("metrics line: expected a JSON object with an integer 'step', got '{}'",
                text.substr(0, 80));
  }
  StepMetrics metrics;
  metrics.step = line["step"].get<std::int64_t>();
  for (const auto& [name, value] : line.items()) {
    if (name == "step") {
      continue;
    }
    const auto number = number_or_null(value, name);
    if (!number) {
      return number.failure();
    }
    bool is_field = false;
    StepMetrics::visit_fields(metrics, [&, &key = name](const char* field, auto& member) {
      if (key == field) {
        member = *number;
        is_field = true;
      }
    });
    if (!is_field) {
      metrics.extra[name] = *number;
    }
  }
  return metrics;
}

MetricMap rollout_metrics(std::span<const SampleOutcome> samples) {
  MetricSet set;
  std::vector<double> lengths;
  for (const SampleOutcome& sample : samples) {
    set.add_mean("rollout/removed_ratio", sample.is_removed ? 1.0 : 0.0);
    if (sample.is_removed) {
      continue;
    }
    const auto length = static_cast<double>(sample.response_tokens);
    lengths.push_back(length);
    set.add_mean("rollout/raw_reward", sample.reward);
    set.add_mean("rollout/truncated_ratio", sample.is_truncated ? 1.0 : 0.0);
    set.add_mean("rollout/response_len/mean", length);
    set.add_min("rollout/response_len/min", length);
    set.add_max("rollout/response_len/max", length);
  }
  add_group_metrics(set, samples);
  MetricMap map = set.values();
  if (!lengths.empty()) {
    std::sort(lengths.begin(), lengths.end());
    const std::size_t half = lengths.size() / 2;
    map["rollout/response_len/median"] =
        lengths.size() % 2 == 1 ? lengths[half] : 0.5 * (lengths[half - 1] + lengths[half]);
  }
  return map;
}

MetricMap train_metrics(const PolicyLossStats& stats, const PolicyLossOptions& options) {
  const auto per_token = [&](double sum) { return ratio(sum, stats.num_tokens); };
  const auto per_pair = [&](double sum) { return ratio(sum, stats.num_mismatch_tokens); };
  const bool corrects = options.mismatch.correction != MismatchCorrection::kNone;
  const auto if_corrected = [&](double sum) { return corrects ? per_pair(sum) : std::nullopt; };
  MetricMap map;
  map["train/loss"] = stats.total_loss(options);
  map["train/pg_loss"] = stats.pg_loss;
  map["train/pg_clipfrac"] = per_token(static_cast<double>(stats.num_clipped));
  map["train/pg_clipfrac_lower"] =
      options.dual_clip ? per_token(static_cast<double>(stats.num_dual_clipped)) : std::nullopt;
  map["train/opsm_clipfrac"] =
      options.opsm_delta ? per_token(static_cast<double>(stats.num_opsm_dropped)) : std::nullopt;
  map["train/ppo_kl"] = per_token(stats.ppo_kl_sum);
  map["train/train_rollout_logprob_abs_diff"] = per_pair(stats.mismatch_abs_sum);
  map["train/train_rollout_kl"] = per_pair(stats.train_rollout_kl_sum);
  map["train/ois"] = per_pair(stats.ratio_sum);
  map["train/tis"] = if_corrected(stats.tis_sum);
  map["train/tis_abs"] = if_corrected(stats.ratio_abs_sum);
  map["train/tis_clipfrac"] = if_corrected(static_cast<double>(stats.num_tis_clipped));
  map["train/ess_ratio"] =
      corrects && stats.num_mismatch_tokens > 0
          ? std::optional(effective_sample_size(stats.tis_sum, stats.tis_square_sum,
                                                static_cast<double>(stats.num_mismatch_tokens)))
          : std::nullopt;
  const bool has_reference = options.kl_loss_coef != 0.0;
  map["train/kl_loss"] = has_reference ? std::optional(stats.kl_loss) : std::nullopt;
  map["train/ref_kl"] = has_reference ? per_token(stats.ref_kl_sum) : std::nullopt;
  return map;
}

void set_loss_metrics(StepMetrics& metrics, const PolicyLossStats& stats,
                      const PolicyLossOptions& options) {
  if (stats.num_mismatch_tokens > 0) {
    metrics.logprob_mismatch_max = stats.mismatch_abs_max;
  }
  metrics.train_rollout_kl = ratio(stats.train_rollout_kl_sum, stats.num_mismatch_tokens);
  metrics.extra.merge(train_metrics(stats, options));
}

double pass_at_k(std::int64_t n, std::int64_t c, std::int64_t k) {
  TDM_CHECK(c >= 0 && c <= n && k >= 1 && k <= n, n, c, k);
  double miss = 1.0;
  for (std::int64_t j = 0; j < k; ++j) {
    miss *= static_cast<double>(std::max<std::int64_t>(n - c - j, 0)) / static_cast<double>(n - j);
  }
  return 1.0 - miss;
}

std::vector<double> log_softmax(std::span<const double> logits, double temperature) {
  TDM_CHECK(!logits.empty() && temperature > 0.0, temperature);
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const double logit : logits) {
    sum += std::exp((logit - top) / temperature);
  }
  std::vector<double> out;
  for (const double logit : logits) {
    out.push_back((logit - top) / temperature - std::log(sum));
  }
  return out;
}

double entropy(std::span<const double> logits, double temperature) {
  double total = 0.0;
  for (const double logprob : log_softmax(logits, temperature)) {
    const double p = std::exp(logprob);
    total -= p > 0.0 ? p * logprob : 0.0;
  }
  return total;
}

}  // namespace tandem
