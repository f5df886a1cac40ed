#include "train/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tandem {

double learning_rate(const OptimizerConfig& config, std::int64_t planned_steps, std::int64_t step) {
  const double t = static_cast<double>(step);
  const double warmup = static_cast<double>(config.lr_warmup_iters);
  if (t <= warmup) {
    return config.lr * t / warmup;
  }
  const double end = static_cast<double>(config.lr_decay_iters.value_or(planned_steps));
  const double progress = end > warmup ? std::clamp((t - warmup) / (end - warmup), 0.0, 1.0) : 1.0;
  const double range = config.lr - config.min_lr;
  if (config.lr_decay_style == "linear") {
    return config.min_lr + range * (1.0 - progress);
  }
  if (config.lr_decay_style == "cosine") {
    return config.min_lr + range * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  }
  if (config.lr_decay_style == "inverse_sqrt") {
    return std::max(config.min_lr, config.lr * std::sqrt(std::max(warmup, 1.0) / t));
  }
  if (config.lr_decay_style == "wsd") {
    const double decay_start = end * (1.0 - config.lr_wsd_decay_fraction);
    const double decayed =
        end > decay_start ? std::clamp((t - decay_start) / (end - decay_start), 0.0, 1.0) : 0.0;
    return config.min_lr + range * (1.0 - decayed);
  }
  return config.lr;  // constant
}

}  // namespace tandem
