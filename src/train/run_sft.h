// run_sft.h — a whole supervised run, from a resolved config to files on disk: `tandem sft` without
// the screen.
#pragma once

#include <functional>
#include <string>

#include "train/run_folder.h"
#include "train/sft.h"
#include "train/toml_config.h"

namespace tandem {

/// What a screen shows. Every member may be empty.
struct SftObserver {
  std::function<void(std::int64_t total_steps, const std::string& config)> on_start;
  std::function<void(const SftStep& step)> on_step;
};

/// Errors: bad input as a Failure naming file, field or key; a failing disk or a diverging loss as
/// a thrown Error, with everything up to the last save intact.
Expected<RunResult> run_sft(const ExecCtx& ctx, const Resolved<SftConfig>& config,
                            const RunOptions& options, const SftObserver& observer);

}  // namespace tandem
