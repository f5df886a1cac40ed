// run_folder.h — what SFT and RL runs share: the folder, its config, checkpoints, and the start
// from a preset, a checkpoint or a resume.
#pragma once

#include <memory>
#include <string>

#include "core/error.h"
#include "models/registry.h"
#include "rl/runs.h"
#include "text/tokenizer.h"
#include "train/train_checkpoint.h"

namespace tandem {

struct RunFolder {
  std::string dir;  // <run.dir>/<run.name>
  std::string
      source_dir;  // model folder the run started from: config.json and tokenizer come from here
  std::string fingerprint;  // of the settings that decide the result
  CheckpointFolder checkpoints;
};

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

/// Restores the newest save; the zero state when there is none yet.   Errors: a Failure, also when
/// the save was made with other settings.
Expected<TrainState> restore_latest(const RunFolder& folder, Model& model, Optimizer& optimizer);

}  // namespace tandem
