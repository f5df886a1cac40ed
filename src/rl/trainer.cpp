#include "rl/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "core/check.h"
#include "core/checked_cast.h"
#include "core/rng.h"
#include "core/timing.h"

namespace tandem {
namespace {

// Kinds of random streams of one run; part of every sampling key.
constexpr std::uint64_t kRolloutStream = 1;
constexpr std::uint64_t kEvalStream = 2;

// Draws of rollout_batch_size problems before dynamic sampling gives up.
constexpr std::int64_t kMaxSamplingRounds = 16;

EngineOptions engine_options(const RlConfig& config, const Tokenizer& tokenizer,
                             std::span<const Problem> train, std::span<const Problem> eval) {
  std::int64_t longest = 0;
  for (const auto& problems : {train, eval}) {
    for (const Problem& problem : problems) {
      longest = std::max(longest, isize(problem.prompt));
    }
  }
  EngineOptions options;
  const std::int64_t response = std::max(config.rollout.rollout_max_response_len,
                                         config.eval.eval_max_response_len.value_or(0));
  options.max_seq_len = longest + response;
  options.max_running_seqs = std::min<std::int64_t>(
      256, config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt);
  options.max_batch_tokens = 2048;
  // The weights change after every step, and the samples of a prompt share it by forking.
  options.prefix_cache = false;
  options.eos_ids.assign(tokenizer.stop_ids().begin(), tokenizer.stop_ids().end());
  return options;
}

std::int64_t optimizer_steps_per_rollout(const RlConfig& config) {
  return config.train.num_steps_per_rollout.value();
}

std::int64_t planned_rollouts(const RlConfig& config, std::size_t num_problems) {
  if (config.rollout.num_rollout) {
    return *config.rollout.num_rollout;
  }
  return static_cast<std::int64_t>(num_problems) * config.rollout.num_epoch.value_or(1) /
         config.rollout.rollout_batch_size;
}

std::vector<SampleOutcome> outcomes(std::span<const Sample> samples) {
  std::vector<SampleOutcome> out;
  for (const Sample& sample : samples) {
    out.push_back({sample.group_index, sample.grade.reward, sample.num_response(),
                   sample.is_truncated, sample.is_removed});
  }
  return out;
}

std::int64_t response_tokens(std::span<const Sample> samples) {
  return std::accumulate(
      samples.begin(), samples.end(), std::int64_t{0},
      [](std::int64_t sum, const Sample& sample) { return sum + sample.num_response(); });
}

}  // namespace

RlTrainer::RlTrainer(const ExecCtx& ctx, Model& model, Model* reference, const Tokenizer& tokenizer,
                     const RlConfig& config, std::span<const Problem> train_problems,
                     std::span<const Problem> eval_problems)
    : ctx_(ctx),
      model_(model),
      reference_(reference),
      tokenizer_(tokenizer),
      config_(config),
      train_problems_(train_problems),
      eval_problems_(eval_problems),
      stream_(static_cast<std::int64_t>(train_problems.size()), config.data.rollout_shuffle,
              static_cast<std::uint64_t>(config.data.rollout_seed)),
      planned_steps_(planned_rollouts(config, train_problems.size())),
      engine_(model, ctx, engine_options(config, tokenizer, train_problems, eval_problems)),
      optimizer_(model.parameters(), config.optimizer,
                 planned_steps_ * optimizer_steps_per_rollout(config)),
      pass_(model, *ctx.device),
      loss_options_(policy_loss_options(config)),
      advantage_options_(advantage_options(config)) {}

void RlTrainer::resume_after(std::int64_t step, std::int64_t data_offset,
                             std::int64_t weight_version) {
  step_ = step;
  data_offset_ = data_offset;
  model_.refresh(ctx_);
  engine_.on_weights_changed(weight_version);
}

void RlTrainer::report(std::string_view phase, std::int64_t done, std::int64_t total) const {
  if (progress_) {
    progress_(phase, done, total);
  }
}

// --- rolling out
// ---------------------------------------------------------------------------------------------------------

std::vector<Sample> RlTrainer::generate(std::span<const Problem* const> problems,
                                        std::uint64_t seed, std::int64_t first_group) {
  RolloutOptions options;
  options.samples_per_prompt = config_.rollout.n_samples_per_prompt;
  options.sampling.temperature = static_cast<float>(config_.rollout.rollout_temperature);
  options.max_response_len = config_.rollout.rollout_max_response_len;
  options.reward = parse_reward_type(config_.rollout.rm_type).value_or_throw();
  options.want_routed_experts = config_.algo.use_rollout_routing_replay;
  options.seed = seed;
  options.first_group = first_group;
  return generate_samples(
      engine_, tokenizer_, problems, options,
      [this](std::int64_t done, std::int64_t total) { report("rollout", done, total); });
}

/// Draws groups until rollout_batch_size of them pass the filter, in data order.
std::vector<Sample> RlTrainer::collect_rollout(StepMetrics& metrics) {
  const GroupFilter filter =
      parse_group_filter(config_.rollout.dynamic_sampling_filter).value_or_throw();
  const std::int64_t wanted = config_.rollout.rollout_batch_size;
  const std::int64_t draw = config_.rollout.over_sampling_batch_size.value_or(wanted);
  const std::int64_t n = config_.rollout.n_samples_per_prompt;
  const std::uint64_t seed = mix_key({static_cast<std::uint64_t>(config_.train.seed),
                                      kRolloutStream, static_cast<std::uint64_t>(step_)});
  std::vector<Sample> kept;
  MetricSet drops;
  for (std::int64_t round = 0; isize(kept) < wanted * n; ++round) {
    if (round == kMaxSamplingRounds) {
      throw_error(
          "rollout {}: only {} of {} groups had reward spread after {} draws; the data is too easy "
          "or too hard for "
          "rollout.dynamic_sampling_filter",
          step_ + 1, isize(kept) / n, wanted, round * draw);
    }
    std::vector<const Problem*> problems;
    for (std::int64_t i = 0; i < draw; ++i) {
      problems.push_back(&train_problems_[usize(stream_.at(data_offset_++))]);
    }
    std::vector<Sample> samples = generate(problems, seed, round * draw);
    for (std::int64_t g = 0; g < draw && isize(kept) < wanted * n; ++g) {
      const auto group = std::span(samples).subspan(usize(g * n), usize(n));
      std::vector<double> rewards;
      std::vector<std::uint8_t> removed;
      for (const Sample& sample : group) {
        rewards.push_back(sample.grade.reward);
        removed.push_back(sample.is_removed ? 1 : 0);
      }
      drops.add_mean("rollout/raw_reward_unfiltered",
                     std::accumulate(rewards.begin(), rewards.end(), 0.0), static_cast<double>(n));
      const FilterVerdict verdict = filter_group(filter, rewards, removed);
      if (verdict != FilterVerdict::kKeep) {
        drops.add_sum(fmt::format("rollout/dynamic_filter/drop_{}", to_string(verdict)), 1);
        continue;
      }
      std::move(group.begin(), group.end(), std::back_inserter(kept));
    }
  }
  metrics.extra.merge(drops.values());
  return kept;
}

// --- log-probabilities
// -----------------------------------------------------------------------------------------------------

namespace {

std::vector<MicroBatch> pack(std::span<const Sample> samples, std::int64_t max_tokens) {
  std::vector<TrainSequence> sequences;
  for (const Sample& sample : samples) {
    sequences.push_back({sample.tokens, sample.num_prompt});
  }
  return pack_sequences(sequences, max_tokens);
}

/// The recorded expert ids of a micro-batch's rows, for replay (R3).
std::vector<std::int32_t> routed_of(std::span<const Sample> samples, const MicroBatch& batch) {
  std::vector<std::int32_t> ids;
  for (const std::int64_t index : batch.sequences) {
    const auto& routed = samples[usize(index)].routed_experts;
    ids.insert(ids.end(), routed.begin(), routed.end());
  }
  return ids;
}

/// The experts a micro-batch is to use: those of the rollout under R3, else the trainer's own. Must
/// outlive the backward, which reads the ids again.
class Replay {
 public:
  Replay(bool enabled, std::span<const Sample> samples, const MicroBatch& batch) {
    if (enabled) {
      ids_ = routed_of(samples, batch);
      const std::int64_t rows = isize(batch.token_ids);
      view_ = {I32Mat{ids_.data(), {rows, isize(ids_) / rows}}, true};
    }
  }
  [[nodiscard]] RoutedExperts* get() { return ids_.empty() ? nullptr : &view_; }

 private:
  std::vector<std::int32_t> ids_;
  RoutedExperts view_;
};

}  // namespace

RlTrainer::Logprobs RlTrainer::logprobs_of(Model& model, std::span<const Sample> samples) {
  Logprobs result;
  result.per_sample.resize(samples.size());
  double entropy_sum = 0;
  std::int64_t num_tokens = 0;
  TokenPass other(model, *ctx_.device);
  TokenPass& pass = &model == &model_ ? pass_ : other;
  const auto batches = pack(samples, config_.train.max_tokens_per_microbatch);
  for (const MicroBatch& batch : batches) {
    Replay replay(config_.algo.use_rollout_routing_replay, samples, batch);
    const auto forward = pass.forward(
        ctx_, batch, static_cast<float>(config_.rollout.rollout_temperature), replay.get());
    entropy_sum += std::accumulate(forward.entropies.begin(), forward.entropies.end(), 0.0);
    num_tokens += isize(forward.entropies);
    for (std::size_t b = 0; b < batch.sequences.size(); ++b) {
      result.per_sample[usize(batch.sequences[b])].assign(
          forward.logprobs.begin() + batch.cu_targets[b],
          forward.logprobs.begin() + batch.cu_targets[b + 1]);
    }
  }
  result.entropy_mean = entropy_sum / static_cast<double>(std::max<std::int64_t>(1, num_tokens));
  return result;
}

LogprobMismatch compare_logprobs(std::span<const Sample> samples,
                                 std::span<const std::vector<float>> old) {
  LogprobMismatch mismatch;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    TDM_CHECK(samples[i].rollout_logprobs.size() == old[i].size());
    for (std::size_t t = 0; t < old[i].size(); ++t) {
      const double x =
          static_cast<double>(old[i][t]) - static_cast<double>(samples[i].rollout_logprobs[t]);
      // NaN must not hide behind std::max.
      mismatch.max_abs = std::isfinite(x) ? std::max(mismatch.max_abs, std::abs(x))
                                          : std::numeric_limits<double>::infinity();
      mismatch.kl_sum += std::min(10.0, std::exp(std::clamp(x, -20.0, 20.0)) - 1.0 - x);
      mismatch.abs_sum += std::abs(x);
      ++mismatch.num_tokens;
    }
  }
  return mismatch;
}

// --- training
// --------------------------------------------------------------------------------------------------------------

/// The samples of one optimizer step. Per-token vectors run over response tokens, sample after
/// sample.
struct RlTrainer::OptimizerBatch {
  std::span<const Sample> samples;
  std::vector<double> weights;                    // [samples], with the step's denominators
  std::span<const std::vector<float>> old;        // [samples]
  std::span<const std::vector<float>> reference;  // [samples] or empty
  std::vector<std::vector<double>> advantages;    // [samples][tokens]
};

PolicyLossStats RlTrainer::accumulate_gradients(const OptimizerBatch& batch) {
  // A sample whose loss is constant has no gradient and is not run; the denominators in `weights`
  // count it all the same.
  const bool every_token_counts =
      loss_options_.kl_loss_coef != 0.0 || loss_options_.entropy_coef != 0.0;
  std::vector<Sample>
      trained;  // pack() wants them side by side; tokens are few, so copying is cheap
  std::vector<std::size_t> origin;
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    const bool has_advantage =
        std::ranges::any_of(batch.advantages[i], [](double a) { return a != 0.0; });
    if (!batch.samples[i].is_removed && batch.samples[i].num_response() > 0 &&
        (every_token_counts || has_advantage)) {
      trained.push_back(batch.samples[i]);
      origin.push_back(i);
    }
  }
  PolicyLossStats stats;
  for (const MicroBatch& micro : pack(trained, config_.train.max_tokens_per_microbatch)) {
    Replay replay(config_.algo.use_rollout_routing_replay, trained, micro);
    const auto forward = pass_.forward(
        ctx_, micro, static_cast<float>(config_.rollout.rollout_temperature), replay.get());
    std::vector<float> old;
    std::vector<float> rollout;
    std::vector<float> reference;
    std::vector<double> advantages;
    std::vector<double> weights;
    for (const std::int64_t index : micro.sequences) {
      const std::size_t i = origin[usize(index)];
      const auto append = [](auto& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(old, batch.old[i]);
      append(rollout, batch.samples[i].rollout_logprobs);
      append(advantages, batch.advantages[i]);
      if (!batch.reference.empty()) {
        append(reference, batch.reference[i]);
      }
      weights.push_back(batch.weights[i]);
    }
    const std::vector<std::uint8_t> mask(old.size(), 1);
    PolicyLossInput<float> input;
    input.logprobs = forward.logprobs;
    input.old_logprobs = old;
    input.rollout_logprobs = rollout;
    input.ref_logprobs = reference;
    input.entropy = forward.entropies;
    input.advantages = advantages;
    input.mask = mask;
    input.cu_seqlens = micro.cu_targets;
    input.sample_weights = weights;
    const PolicyLossOutput loss = policy_loss(input, loss_options_);
    stats.add(loss.stats);
    const std::vector<float> d_logprobs(loss.d_logprobs.begin(), loss.d_logprobs.end());
    const std::vector<float> d_entropy(loss.d_entropy.begin(), loss.d_entropy.end());
    pass_.backward(ctx_, d_logprobs, d_entropy);
  }
  return stats;
}

void RlTrainer::train_on(std::span<const Sample> samples, const Logprobs& old,
                         const Logprobs& reference, StepMetrics& metrics) {
  AdvantageInput input;
  std::vector<double> rewards;
  std::vector<double> kl;
  std::vector<std::int64_t> groups;
  std::vector<std::uint8_t> removed;
  std::vector<std::int64_t> cu_seqlens{0};
  for (std::size_t i = 0; i < samples.size(); ++i) {
    rewards.push_back(samples[i].grade.reward);
    groups.push_back(samples[i].group_index);
    removed.push_back(samples[i].is_removed ? 1 : 0);
    cu_seqlens.push_back(cu_seqlens.back() + samples[i].num_response());
    for (std::size_t t = 0; t < reference.per_sample.size() && t < old.per_sample[i].size(); ++t) {
      kl.push_back(static_cast<double>(old.per_sample[i][t]) -
                   static_cast<double>(reference.per_sample[i][t]));
    }
  }
  const std::vector<std::uint8_t> mask(usize(cu_seqlens.back()), 1);
  const AdvantageOutput advantages =
      compute_advantages({rewards, groups, removed, cu_seqlens, mask, kl}, advantage_options_);

  const std::int64_t num_steps = optimizer_steps_per_rollout(config_);
  const std::int64_t batch_size = isize(samples) / num_steps;
  PolicyLossStats stats;
  for (std::int64_t k = 0; k < num_steps; ++k) {
    const auto begin = usize(k * batch_size);
    OptimizerBatch batch;
    batch.samples = samples.subspan(begin, usize(batch_size));
    batch.old = std::span(old.per_sample).subspan(begin, usize(batch_size));
    if (!reference.per_sample.empty()) {
      batch.reference = std::span(reference.per_sample).subspan(begin, usize(batch_size));
    }
    std::vector<std::int64_t> num_trainable;
    for (std::size_t i = 0; i < batch.samples.size(); ++i) {
      num_trainable.push_back(batch.samples[i].is_removed ? 0 : batch.samples[i].num_response());
      batch.advantages.emplace_back(advantages.per_token.begin() + cu_seqlens[begin + i],
                                    advantages.per_token.begin() + cu_seqlens[begin + i + 1]);
    }
    batch.weights = sample_weights(loss_options_, num_trainable);
    model_.parameters().zero_grads();
    stats.add(accumulate_gradients(batch));
    const OptimizerStep step = optimizer_.step(ctx_);
    model_.refresh(ctx_);
    metrics.grad_norm = step.grad_norm;
    metrics.lr = step.lr;
    report("train", k + 1, num_steps);
  }
  if (optimizer_.num_skipped() > 3) {
    throw_error("rollout {}: the gradient was not finite in {} optimizer steps; lower optimizer.lr",
                step_ + 1, optimizer_.num_skipped());
  }
  engine_.on_weights_changed();
  set_loss_metrics(metrics, stats, loss_options_);
  metrics.extra.merge(train_metrics(stats, loss_options_));
}

// --- steps
// -----------------------------------------------------------------------------------------------------------------

void RlTrainer::evaluate(RlStep& result) {
  std::vector<const Problem*> problems;
  for (const Problem& problem : eval_problems_) {
    problems.push_back(&problem);
  }
  RolloutOptions options;
  options.samples_per_prompt = config_.eval.n_samples_per_eval_prompt;
  options.max_response_len =
      config_.eval.eval_max_response_len.value_or(config_.rollout.rollout_max_response_len);
  options.reward = parse_reward_type(config_.rollout.rm_type).value_or_throw();
  options.seed = mix_key({static_cast<std::uint64_t>(config_.train.seed), kEvalStream});
  const auto progress = [this](std::int64_t done, std::int64_t total) {
    report("evaluate", done, total);
  };

  options.sampling.temperature = static_cast<float>(config_.eval.eval_temperature);
  options.sampling.top_k =
      std::max<std::int32_t>(0, checked_cast<std::int32_t>(config_.eval.eval_top_k));
  result.eval_samples = generate_samples(engine_, tokenizer_, problems, options, progress);
  options.samples_per_prompt = 1;
  options.sampling = {.temperature = 0.0F};
  const std::vector<Sample> greedy =
      generate_samples(engine_, tokenizer_, problems, options, progress);

  result.metrics.eval_accuracy = accuracy(result.eval_samples);
  result.metrics.eval_accuracy_greedy = accuracy(greedy);
  result.evals = {{"sampled", *result.metrics.eval_accuracy, isize(result.eval_samples)},
                  {"greedy", *result.metrics.eval_accuracy_greedy, isize(greedy)}};
}

RlStep RlTrainer::evaluate_before_training() {
  const auto start = Clock::now();
  RlStep result;
  evaluate(result);
  const Logprobs old = logprobs_of(model_, result.eval_samples);
  const LogprobMismatch mismatch = compare_logprobs(result.eval_samples, old.per_sample);
  result.metrics.entropy = old.entropy_mean;
  result.metrics.logprob_mismatch_max = mismatch.max_abs;
  result.metrics.train_rollout_kl =
      mismatch.kl_sum / static_cast<double>(std::max<std::int64_t>(1, mismatch.num_tokens));
  result.metrics.time_total_s = seconds_since(start);
  return result;
}

RlStep RlTrainer::step() {
  const auto start = Clock::now();
  RlStep result;
  StepMetrics& metrics = result.metrics;
  result.samples = collect_rollout(metrics);
  metrics.time_rollout_s = seconds_since(start);

  const auto train_start = Clock::now();
  const Logprobs old = logprobs_of(model_, result.samples);
  const Logprobs reference =
      reference_ != nullptr ? logprobs_of(*reference_, result.samples) : Logprobs{};
  train_on(result.samples, old, reference, metrics);
  metrics.time_train_s = seconds_since(train_start);

  metrics.entropy = old.entropy_mean;

  const LogprobMismatch mismatch = compare_logprobs(result.samples, old.per_sample);
  const double num_tokens = static_cast<double>(std::max<std::int64_t>(1, mismatch.num_tokens));
  metrics.step = ++step_;
  metrics.logprob_mismatch_max = mismatch.max_abs;
  metrics.train_rollout_kl = mismatch.kl_sum / num_tokens;
  metrics.extra["train/train_rollout_logprob_abs_diff"] = mismatch.abs_sum / num_tokens;
  metrics.extra.merge(rollout_metrics(outcomes(result.samples)));
  metrics.reward_mean = accuracy(result.samples);
  const std::int64_t generated = response_tokens(result.samples);
  std::int64_t all_tokens = 0;
  std::int64_t truncated = 0;
  for (const Sample& sample : result.samples) {
    all_tokens += isize(sample.tokens) - 1;
    truncated += sample.is_truncated ? 1 : 0;
  }
  metrics.response_tokens_mean =
      static_cast<double>(generated) / static_cast<double>(result.samples.size());
  metrics.truncated_fraction =
      static_cast<double>(truncated) / static_cast<double>(result.samples.size());
  metrics.rollout_tokens_per_s = static_cast<double>(generated) / *metrics.time_rollout_s;
  metrics.train_tokens_per_s = static_cast<double>(all_tokens) / *metrics.time_train_s;

  const bool last = step_ == planned_steps_;
  if (config_.eval.eval_interval && !eval_problems_.empty() &&
      (step_ % *config_.eval.eval_interval == 0 || last)) {
    evaluate(result);
  }
  metrics.time_total_s = seconds_since(start);
  return result;
}

}  // namespace tandem
