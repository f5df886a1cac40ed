// trainer.h — the reinforcement-learning step: roll out, grade, compare log-probabilities, train.
// Source: rl.md 1.1.
//
// Engine and trainer hold the same Model object, so the weights are the same bits and so is the
// arithmetic (one forward): the trainer's log-probabilities before the first optimizer step on a
// rollout equal the sampler's exactly. Each step measures it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "models/model.h"
#include "rl/advantage.h"
#include "rl/metrics.h"
#include "rl/policy_loss.h"
#include "rl/rollout.h"
#include "train/config.h"
#include "train/data_stream.h"
#include "train/optimizer.h"
#include "train/token_pass.h"

namespace tandem {

/// What a step did, for metrics, store and screen.
struct RlStep {
  StepMetrics metrics;
  std::vector<Sample> samples;
  std::vector<EvalRecord> evals;
  std::vector<Sample> eval_samples;  // sampled ones, when evaluated
};

/// How far the trainer's log-probabilities are from the sampler's; all zero when the arithmetic is
/// the same.
struct LogprobMismatch {
  double max_abs = 0;  // infinite when a difference is not a number
  double kl_sum = 0;   // k3 of old - rollout, summed over tokens
  double abs_sum = 0;
  std::int64_t num_tokens = 0;
};
/// Shapes: old [samples][response tokens].
[[nodiscard]] LogprobMismatch compare_logprobs(std::span<const Sample> samples,
                                               std::span<const std::vector<float>> old);

/// "rollout", "train", "evaluate": `done` of `total`.
using RlProgress =
    std::function<void(std::string_view phase, std::int64_t done, std::int64_t total)>;

class RlTrainer {
 public:
  /// `reference` may be null (no KL term). Everything referenced must outlive the trainer.
  RlTrainer(const ExecCtx& ctx, Model& model, Model* reference, const Tokenizer& tokenizer,
            const RlConfig& config, std::span<const Problem> train_problems,
            std::span<const Problem> eval_problems);

  void set_progress(RlProgress progress) { progress_ = std::move(progress); }

  /// Step 0: evaluation only, and the log-prob comparison on its samples.
  RlStep evaluate_before_training();
  /// The next rollout and its optimizer steps.   Errors: throws Error when the loss or too many
  /// gradients are not finite, or when dynamic sampling finds no groups with spread.
  RlStep step();

  [[nodiscard]] std::int64_t num_steps() const { return step_; }
  [[nodiscard]] std::int64_t planned_steps() const { return planned_steps_; }
  [[nodiscard]] std::int64_t data_offset() const { return data_offset_; }
  [[nodiscard]] std::int64_t weight_version() const { return engine_.weight_version(); }
  [[nodiscard]] Optimizer& optimizer() { return optimizer_; }
  [[nodiscard]] const Engine& engine() const { return engine_; }
  /// Continues after `step`; parameters and optimizer were restored by the caller.
  void resume_after(std::int64_t step, std::int64_t data_offset, std::int64_t weight_version);

 private:
  struct Logprobs {
    std::vector<std::vector<float>> per_sample;  // [samples][response tokens]
    double entropy_mean = 0;                     // nats a token, over all of them
  };

  std::vector<Sample> collect_rollout(StepMetrics& metrics);
  std::vector<Sample> generate(std::span<const Problem* const> problems, std::uint64_t seed,
                               std::int64_t first_group);
  Logprobs logprobs_of(Model& model, std::span<const Sample> samples);
  void train_on(std::span<const Sample> samples, const Logprobs& old, const Logprobs& reference,
                StepMetrics& metrics);
  void evaluate(RlStep& result);
  void report(std::string_view phase, std::int64_t done, std::int64_t total) const;

  struct OptimizerBatch;
  PolicyLossStats accumulate_gradients(const OptimizerBatch& batch);

  ExecCtx ctx_;
  Model& model_;
  Model* reference_;
  const Tokenizer& tokenizer_;
  RlConfig config_;
  std::span<const Problem> train_problems_;
  std::span<const Problem> eval_problems_;
  DataStream stream_;
  std::int64_t planned_steps_;
  Engine engine_;
  Optimizer optimizer_;
  TokenPass pass_;
  PolicyLossOptions loss_options_;
  AdvantageOptions advantage_options_;
  RlProgress progress_;
  std::int64_t step_ = 0;
  std::int64_t data_offset_ = 0;
};

}  // namespace tandem
