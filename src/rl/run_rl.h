// run_rl.h — a whole reinforcement-learning run, from a resolved config to files on disk: `tandem
// rl` without the screen.
#pragma once

#include <functional>
#include <string>

#include "rl/trainer.h"
#include "train/run_folder.h"
#include "train/toml_config.h"

namespace tandem {

/// What a screen shows. Every member may be empty.
struct RlObserver {
  std::function<void(std::int64_t total_steps, const std::string& config,
                     const std::string& memory_plan)>
      on_start;
  std::function<void(const RlStep& step)> on_step;  // step 0 is the evaluation before training
  RlProgress on_progress;                           // inside a step
};

/// Errors: bad input as a Failure naming file, field or key; a failing disk or a diverging loss as
/// a thrown Error, with everything up to the last finished step intact.
Expected<RunResult> run_rl(const ExecCtx& ctx, const Resolved<RlConfig>& config,
                           const RunOptions& options, const RlObserver& observer);

}  // namespace tandem
