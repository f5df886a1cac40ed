// runs.h — whole runs, from a resolved config to files on disk: `tandem sft` and `tandem rl`
// without the screen.
//
// A run is the folder <run.dir>/<run.name>: run.sqlite and metrics.jsonl (RL), sft.jsonl (SFT),
// config.toml, checkpoints/, model/ (the exported result), report.html (RL). A step is durable
// before its metrics line is; a killed run that is resumed loses at most the step in flight and
// ends with the same bits as an undisturbed one.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <string_view>

#include "core/error.h"
#include "ops/exec_ctx.h"
#include "rl/trainer.h"
#include "train/config.h"
#include "train/sft.h"
#include "train/toml_config.h"

namespace tandem {

struct RunOptions {
  bool resume = false;  // continue the run's folder instead of starting a new one
  const std::atomic<bool>* stop =
      nullptr;  // set by Ctrl-C: the run ends after the step in flight, resumable
};

enum class RunEnd { kFinished, kStopped };

struct RunResult {
  RunEnd end = RunEnd::kFinished;
  std::string run_dir;
  std::string model_dir;    // exported model; empty when stopped
  std::string report_path;  // RL only
};

/// What a screen shows. Every member may be empty.
struct SftObserver {
  std::function<void(std::int64_t total_steps, const std::string& config)> on_start;
  std::function<void(const SftStep& step)> on_step;
};
struct RlObserver {
  std::function<void(std::int64_t total_steps, const std::string& config,
                     const std::string& memory_plan)>
      on_start;
  std::function<void(const RlStep& step)> on_step;  // step 0 is the evaluation before training
  RlProgress on_progress;                           // inside a step
};

/// Errors: bad input as a Failure naming file, field or key; a failing disk or a diverging loss as
/// a thrown Error, with everything up to the last finished step intact.
Expected<RunResult> run_sft(const ExecCtx& ctx, const Resolved<SftConfig>& config,
                            const RunOptions& options, const SftObserver& observer);
Expected<RunResult> run_rl(const ExecCtx& ctx, const Resolved<RlConfig>& config,
                           const RunOptions& options, const RlObserver& observer);

}  // namespace tandem
