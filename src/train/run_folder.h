// run_folder.h — a training run on disk, and its start from a preset, a checkpoint or a resume.
//
// A run is the folder <run.dir>/<run.name>: config.toml, checkpoints/, model/ (the exported
// result), and sft.jsonl (SFT) or run.sqlite, metrics.jsonl and report.html (RL). A step is durable
// before its metrics line is; a killed run that is resumed loses at most what came after its last
// save and ends with the same bits as an undisturbed one.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "core/error.h"
#include "models/registry.h"
#include "text/tokenizer.h"
#include "train/config.h"
#include "train/train_checkpoint.h"

namespace tandem {

struct RunOptions {
  bool resume = false;  // continue the run's folder instead of starting a new one
  const std::atomic<bool>* stop =
      nullptr;  // set by Ctrl-C: the run ends after the step in flight, resumable

  [[nodiscard]] bool stop_requested() const { return stop != nullptr && stop->load(); }
};

enum class RunEnd { kFinished, kStopped };

struct RunResult {
  RunEnd end = RunEnd::kFinished;
  std::string run_dir;
  std::string model_dir;    // exported model; empty when stopped
  std::string report_path;  // RL only
};

struct RunFolder {
  std::string dir;  // <run.dir>/<run.name>
  std::string
      source_dir;  // model folder the run started from: config.json and tokenizer come from here
  std::string fingerprint;  // of the settings that decide the result
  CheckpointFolder checkpoints;
  std::string made_now;  // what opening created: the folder, or config.toml in one that was there
};

/// Removes what opening a folder created unless the start succeeds, so that a mistake in the config
/// can be mended and the same command typed again. Never removes what was there before.
class StartGuard {
 public:
  explicit StartGuard(const RunFolder& folder) : made_now_(folder.made_now) {}
  ~StartGuard();
  StartGuard(const StartGuard&) = delete;
  StartGuard& operator=(const StartGuard&) = delete;

  void started() { made_now_.clear(); }

 private:
  std::string made_now_;
};

/// Writes the result to `save_hf`, or to <run>/model when that is empty, and returns the folder.
/// Only <run>/model is ever replaced.   Errors: throws Error when the disk fails or when `save_hf`
/// holds a checkpoint.
std::string export_result(const RunFolder& folder, const std::string& save_hf,
                          const nn::ParameterStore& parameters);

/// Creates the folder (or checks that it is there, on resume) and writes config.toml. With
/// model.init, writes the preset's initial weights to <dir>/init once.   Errors: a Failure naming
/// folder and key.
Expected<RunFolder> open_run_folder(const ModelConfig& model, const RunConfig& run,
                                    const CheckpointConfig& checkpoint, std::uint64_t seed,
                                    const std::string& config_text, const RunOptions& options);

struct LoadedModel {
  std::unique_ptr<Model> model;
  std::unique_ptr<Tokenizer> tokenizer;
};
/// Loads a trainable model and its tokenizer and checks that they fit each other.
Expected<LoadedModel> load_trainable(const ExecCtx& ctx, const std::string& dir);

/// Loads a model that is only run, such as the reference policy.
Expected<std::unique_ptr<Model>> load_frozen(const ExecCtx& ctx, const std::string& dir);

/// Restores the newest save; the zero state when there is none yet.   Errors: a Failure, also when
/// the save was made with other settings.
Expected<TrainState> restore_latest(const RunFolder& folder, Model& model, Optimizer& optimizer);

}  // namespace tandem
