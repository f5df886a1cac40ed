// train_checkpoint.h — a trainer's state on disk. Each save is a folder <save>/step_0000010 that is
// itself a model folder (config.json, model.safetensors with the fp32 masters, tokenizer), plus
// optimizer.safetensors and state.json; the file <save>/latest names the newest one and is written
// last. A crash at any moment leaves the previous save intact.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/error.h"
#include "nn/parameter.h"
#include "train/optimizer.h"

namespace tandem {

/// Everything besides tensors. What is not here is a function of it and the config.
struct TrainState {
  std::int64_t step = 0;  // last finished step: SFT iteration, or rollout of RL
  std::int64_t optimizer_steps = 0;
  std::int64_t skipped_steps = 0;
  std::int64_t weight_version = 0;
  std::int64_t data_offset = 0;  // records taken from the data so far
  std::string
      run_fingerprint;  // of the settings that decide the result; a resume must have the same
};

/// Writes the model alone: config.json and tokenizer files are copied from `source_dir`.
/// Errors: throws Error naming the path when the disk fails.
void export_model(const std::string& dir, const nn::ParameterStore& parameters,
                  const std::string& source_dir);

class CheckpointFolder {
 public:
  /// `retain_interval`: saves of steps it divides are kept for ever; of the others the newest two
  /// stay.
  CheckpointFolder(std::string dir, std::optional<std::int64_t> retain_interval)
      : dir_(std::move(dir)), retain_interval_(retain_interval) {}

  /// Writes step_N completely, without naming it in `latest` yet.   Errors: throws Error when the
  /// disk fails.
  void write(const TrainState& state, const nn::ParameterStore& parameters,
             const Optimizer& optimizer, const std::string& source_dir) const;
  /// Makes step_N the newest, and removes older saves that are not retained.
  void publish(std::int64_t step) const;

  /// The folder that `latest` names; nullopt when nothing was ever published.
  [[nodiscard]] std::optional<std::string> latest() const;

  /// Fills parameters and optimizer from a step folder.   Errors: a Failure naming file and field
  /// or tensor.
  static Expected<TrainState> restore(const std::string& step_dir, nn::ParameterStore& parameters,
                                      Optimizer& optimizer);

 private:
  [[nodiscard]] std::string step_dir(std::int64_t step) const;

  std::string dir_;
  std::optional<std::int64_t> retain_interval_;
};

}  // namespace tandem
