#include "train/run_sft.h"

#include <fstream>

#include "core/checked_cast.h"
#include "io/jsonl.h"
#include "io/lines.h"
#include "train/demonstrations.h"

namespace tandem {
namespace {

std::string metrics_line(const SftStep& step) {
  return fmt::format(
      R"({{"step":{},"loss":{:.9g},"grad_norm":{:.9g},"lr":{:.9g},"train_tokens_per_s":{:.6g},"time_total_s":{:.6g}}})",
      step.step, step.loss, step.optimizer.grad_norm, step.optimizer.lr,
      static_cast<double>(step.num_tokens) / step.seconds, step.seconds);
}

/// The lines of steps up to `step`; a killed run may have written more than its last save.
std::vector<std::string> kept_lines(const std::string& path, std::int64_t step) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; isize(lines) < step && std::getline(file, line);) {
    lines.push_back(line);
  }
  return lines;
}

}  // namespace

Expected<RunResult> run_sft(const ExecCtx& ctx, const Resolved<SftConfig>& resolved,
                            const RunOptions& options, const SftObserver& observer) {
  const SftConfig& config = resolved.config;
  auto folder =
      open_run_folder(config.model, config.run, config.checkpoint,
                      static_cast<std::uint64_t>(config.train.seed), resolved.text(), options);
  if (!folder.ok()) {
    return folder.failure();
  }
  StartGuard guard(*folder);
  auto loaded = load_trainable(ctx, folder->source_dir);
  if (!loaded.ok()) {
    return loaded.failure();
  }
  const auto records =
      load_jsonl(config.data.prompt_data, {config.data.input_key, config.data.label_key});
  if (!records.ok()) {
    return records.failure();
  }
  auto data = encode_demonstrations(*loaded->tokenizer, *records);
  if (!data.ok() || data->empty()) {
    return fail("{}: {}", config.data.prompt_data,
                data.ok() ? "expected at least one record" : data.message());
  }
  SftTrainer trainer(ctx, *loaded->model, config, *std::move(data));
  const auto state = restore_latest(*folder, *loaded->model, trainer.optimizer());
  if (!state.ok()) {
    return state.failure();
  }
  if (state->step > 0) {
    trainer.resume_after(state->step);
  }
  const std::string metrics_path = folder->dir + "/sft.jsonl";
  rewrite_lines(metrics_path, kept_lines(metrics_path, state->step));
  guard.started();
  if (observer.on_start) {
    observer.on_start(config.train.train_iters, resolved.text());
  }

  const auto save = [&] {
    const Optimizer& optimizer = trainer.optimizer();
    folder->checkpoints.write({trainer.num_steps(), optimizer.num_steps(), optimizer.num_skipped(),
                               0, 0, folder->fingerprint},
                              loaded->model->parameters(), optimizer, folder->source_dir);
    folder->checkpoints.publish(trainer.num_steps());
  };
  while (trainer.num_steps() < config.train.train_iters) {
    const SftStep step = trainer.step();
    append_line(metrics_path, metrics_line(step));
    if (observer.on_step) {
      observer.on_step(step);
    }
    const bool stopped = options.stop_requested();
    const bool due =
        config.checkpoint.save_interval && step.step % *config.checkpoint.save_interval == 0;
    if (due || stopped || step.step == config.train.train_iters) {
      save();
    }
    if (stopped && step.step < config.train.train_iters) {
      return RunResult{RunEnd::kStopped, folder->dir, "", ""};
    }
  }
  const std::string model_dir =
      export_result(*folder, config.checkpoint.save_hf, loaded->model->parameters());
  return RunResult{RunEnd::kFinished, folder->dir, model_dir, ""};
}

}  // namespace tandem
