#include "train/run_folder.h"

#include <filesystem>
#include <sstream>

#include "io/atomic_file.h"
#include "models/kimi_k3/init.h"

namespace tandem {
namespace fs = std::filesystem;
namespace {

/// The resolved config without what does not decide the result: names, threads, where checkpoints
/// go.
std::string fingerprint_of(const std::string& config_text) {
  std::istringstream lines(config_text);
  std::string kept;
  std::string table;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('[')) {
      table = line;
    }
    if (line.empty() || table == "[run]" || table == "[checkpoint]" || table == "[model]") {
      continue;
    }
    kept += line.substr(0, line.find(" #"));  // origins are comments
    kept += '\n';
  }
  return kept;
}

/// A tokenizer file beside the preset's weights: the vocabulary decides the model's vocab_size.
Status init_model(const ModelConfig& config, std::uint64_t seed, const std::string& dir) {
  auto preset = kimi_k3::find_preset(config.init);
  if (!preset) {
    return fail("model.init: unknown preset \"{}\", expected k3-nano, k3-tiny or k3-mini",
                config.init);
  }
  if (config.tokenizer.empty()) {
    return fail(
        "model.tokenizer: expected a tokenizer file (it decides the vocabulary of model.init)");
  }
  std::error_code error;
  fs::create_directories(dir, error);
  fs::copy_file(config.tokenizer, dir + "/char_tokenizer.json",
                fs::copy_options::overwrite_existing, error);
  if (error) {
    return fail("model.tokenizer: cannot copy {} to {}: {}", config.tokenizer, dir,
                error.message());
  }
  const auto tokenizer = load_tokenizer(dir);
  if (!tokenizer.ok()) {
    return tokenizer.failure();
  }
  preset->config.vocab_size = (*tokenizer)->vocab_size();
  preset->config.eos_token_id =
      (*tokenizer)->stop_ids().empty() ? -1 : (*tokenizer)->stop_ids().front();
  kimi_k3::InitOptions options = preset->defaults;
  options.seed = seed;
  kimi_k3::write_initial_checkpoint(*preset, options, dir);
  return Ok{};
}

}  // namespace

Expected<RunFolder> open_run_folder(const ModelConfig& model, const RunConfig& run,
                                    const CheckpointConfig& checkpoint, std::uint64_t seed,
                                    const std::string& config_text, const RunOptions& options) {
  const std::string dir = run.dir + "/" + run.name;
  const std::string save = checkpoint.save.empty() ? dir + "/checkpoints" : checkpoint.save;
  RunFolder folder{
      dir, model.load, fingerprint_of(config_text), {save, checkpoint.save_retain_interval}, ""};
  const bool exists = fs::exists(dir + "/config.toml");
  if (options.resume && !exists) {
    return fail("{}: nothing to resume; expected the folder of an earlier run", dir);
  }
  if (!options.resume && exists) {
    return fail(
        "{}: a run of this name is already there; choose another run.name, continue it with "
        "--resume, or remove the folder",
        dir);
  }
  if (!exists && !checkpoint.save_hf.empty() && fs::exists(checkpoint.save_hf)) {
    return fail("checkpoint.save_hf: {} is already there; expected a new folder",
                checkpoint.save_hf);
  }
  if (!exists) {
    folder.made_now = fs::exists(dir) ? dir + "/config.toml" : dir;
  }
  if (model.load.empty()) {
    folder.source_dir = dir + "/init";
    if (!exists) {
      if (const Status status = init_model(model, seed, folder.source_dir); !status.ok()) {
        return status.failure();
      }
    }
  }
  if (!exists) {
    std::error_code error;
    fs::create_directories(save, error);
    if (error) {
      return fail("{}: cannot create the folder: {}", save, error.message());
    }
    fs::create_directories(dir);
    write_file_atomic(dir + "/config.toml", config_text);
  }
  return folder;
}

StartGuard::~StartGuard() {
  if (!made_now_.empty()) {
    std::error_code ignored;  // what cannot be removed shows up at the next start
    fs::remove_all(made_now_, ignored);
  }
}

std::string export_result(const RunFolder& folder, const std::string& save_hf,
                          const nn::ParameterStore& parameters) {
  const std::string dir = save_hf.empty() ? folder.dir + "/model" : save_hf;
  if (save_hf.empty()) {
    fs::remove_all(dir);  // of an export that was cut off, or of a finished run that is resumed
  }
  export_model(dir, parameters, folder.source_dir);
  return dir;
}

Expected<LoadedModel> load_trainable(const ExecCtx& ctx, const std::string& dir) {
  auto tokenizer = load_tokenizer(dir);
  if (!tokenizer.ok()) {
    return tokenizer.failure();
  }
  auto model = load_model(ctx, dir, {.trainable = true});
  if (!model.ok()) {
    return model.failure();
  }
  if ((*tokenizer)->vocab_size() > (*model)->vocab_size()) {
    return fail("{}: the tokenizer has {} ids but the model's vocab_size is {}", dir,
                (*tokenizer)->vocab_size(), (*model)->vocab_size());
  }
  return LoadedModel{*std::move(model), *std::move(tokenizer)};
}

Expected<std::unique_ptr<Model>> load_frozen(const ExecCtx& ctx, const std::string& dir) {
  return load_model(ctx, dir, {.trainable = false});
}

Expected<TrainState> restore_latest(const RunFolder& folder, Model& model, Optimizer& optimizer) {
  const auto latest = folder.checkpoints.latest();
  if (!latest) {
    return TrainState{};
  }
  auto state = CheckpointFolder::restore(*latest, model.parameters(), optimizer);
  if (state.ok() && state->run_fingerprint != folder.fingerprint) {
    return fail(
        "{}: was saved under other settings; resume with the config that started the run "
        "({}/config.toml)",
        *latest, folder.dir);
  }
  return state;
}

}  // namespace tandem
