// sft.h — supervised fine-tuning: next-token cross-entropy on the answers of demonstrations.
#pragma once

#include <cstdint>
#include <vector>

#include "models/model.h"
#include "train/config.h"
#include "train/data_stream.h"
#include "train/demonstrations.h"
#include "train/optimizer.h"
#include "train/token_pass.h"

namespace tandem {

struct SftStep {
  std::int64_t step = 0;
  double loss = 0;              // mean over the step's target tokens, nats
  std::int64_t num_tokens = 0;  // rows run: prompt and answer
  OptimizerStep optimizer;
  double seconds = 0;
};

class SftTrainer {
 public:
  /// Takes global_batch_size demonstrations a step, in file order or shuffled each epoch. `model`
  /// must be loaded trainable and outlive the trainer, as must what `ctx` points to.
  SftTrainer(const ExecCtx& ctx, Model& model, const SftConfig& config,
             std::vector<EncodedDemonstration> data);

  /// One optimizer step.   Errors: throws Error when the loss is not finite, before anything
  /// changed.
  SftStep step();

  [[nodiscard]] std::int64_t num_steps() const { return step_; }
  [[nodiscard]] Optimizer& optimizer() { return optimizer_; }
  /// Continues after `step` finished steps; parameters and optimizer were restored by the caller.
  void resume_after(std::int64_t step);

 private:
  ExecCtx ctx_;
  Model& model_;
  SftConfig config_;
  std::vector<EncodedDemonstration> data_;
  DataStream stream_;
  Optimizer optimizer_;
  TokenPass pass_;
  std::int64_t step_ = 0;
};

}  // namespace tandem
