// init.h — seeded weights and the presets: `k3-nano` (demo), `k3-tiny` (parity), `k3-mini` and
// `k3-mid` (speed), `k3` (the released shape).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/kimi_k3/config.h"

namespace tandem::kimi_k3 {

enum class ExpertFormat { kPlain, kMxFp4, kNvFp4 };

struct InitOptions {
  std::uint64_t seed = 1;
  bool bf16 = false;  // dtype of unquantised matrices; F32 otherwise
  ExpertFormat experts = ExpertFormat::kPlain;
  bool fp8_attention = false;  // attention projections in block FP8
};

struct Preset {
  std::string_view name;
  std::string_view description;
  Config config;
  std::int64_t a_log_length = 0;
  bool parity_init = false;  // the feature-stressing init of kimi-k3.md 10; else one that trains
  InitOptions defaults;
};

/// All presets, smallest first.
[[nodiscard]] const std::vector<Preset>& presets();
/// nullopt for an unknown name.
[[nodiscard]] std::optional<Preset> find_preset(std::string_view name);

/// Writes config.json and model.safetensors into `dir`. Every value is a function of (seed, tensor
/// name, index) in exact arithmetic, so a checkpoint is the same on every machine.   Errors: throws
/// Error when the disk fails.
void write_initial_checkpoint(const Preset& preset, const InitOptions& options,
                              const std::string& dir,
                              const std::function<void(double done)>& progress = {});

}  // namespace tandem::kimi_k3
