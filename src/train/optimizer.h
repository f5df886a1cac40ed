// optimizer.h — AdamW and Muon over a model's parameters: clipping by the global norm, decoupled
// decay, schedules, state that can be saved and restored bit for bit.   Source: rl.md 3.1-3.3.
#pragma once

#include <cstdint>
#include <vector>

#include "io/host_tensors.h"
#include "io/safetensors.h"
#include "nn/parameter.h"
#include "ops/exec_ctx.h"
#include "train/config.h"

namespace tandem {

struct OptimizerStep {
  double grad_norm = 0;  // before clipping
  double lr = 0;
  bool skipped = false;  // the norm was not finite: nothing changed but the count of skipped steps
};

class Optimizer {
 public:
  /// `parameters` must outlive the optimizer. `planned_steps`: where the schedule ends.
  Optimizer(nn::ParameterStore& parameters, const OptimizerConfig& config,
            std::int64_t planned_steps);

  /// One step from the accumulated gradients, which are left as they are.
  OptimizerStep step(const ExecCtx& ctx);

  [[nodiscard]] std::int64_t num_steps() const { return num_steps_; }
  [[nodiscard]] std::int64_t num_skipped() const { return num_skipped_; }

  /// Matrices of linear layers decay; embeddings, norms, biases, convolutions and pseudo-queries do
  /// not.
  [[nodiscard]] static bool decays(const nn::Parameter& parameter);

  /// The moments as named tensors, valid as long as this object and until its next step.
  [[nodiscard]] HostTensors state() const;
  /// Errors: a Failure naming the tensor that is missing or has another shape.
  Status restore(const SafetensorsFile& file, std::int64_t num_steps, std::int64_t num_skipped);

 private:
  enum class Rule { kFrozen, kAdamW, kMuon };
  struct Slot {
    nn::Parameter* parameter = nullptr;
    Rule rule = Rule::kAdamW;
    double weight_decay = 0;
    Storage first;   // Adam's m, or Muon's momentum
    Storage second;  // Adam's v
  };

  [[nodiscard]] double grad_norm(const ExecCtx& ctx) const;

  OptimizerConfig config_;
  std::int64_t planned_steps_;
  std::int64_t num_steps_ = 0;
  std::int64_t num_skipped_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace tandem
