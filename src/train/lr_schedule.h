// lr_schedule.h — the learning rate as a pure function of the optimizer step.   Source: rl.md 3.3.
#pragma once

#include <cstdint>

#include "train/config.h"

namespace tandem {

/// The rate of optimizer step `step` (from 1). `planned_steps` is where a decay ends unless
/// lr_decay_iters says otherwise. Warm-up is lr * step / lr_warmup_iters; afterwards the named
/// curve from lr down to min_lr.
[[nodiscard]] double learning_rate(const OptimizerConfig& config, std::int64_t planned_steps,
                                   std::int64_t step);

}  // namespace tandem
