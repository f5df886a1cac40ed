#include "rl/run_rl.h"

#include <memory>

#include "core/checked_cast.h"
#include "rl/report.h"
#include "rl/run_store.h"

namespace tandem {
namespace {

// Transcripts of an evaluation that go into the store.
constexpr std::int64_t kStoredEvalSamples = 64;

RunInfo run_info(const Resolved<RlConfig>& resolved) {
  const RlConfig& config = resolved.config;
  return {config.run.name, resolved.text(),
          fmt::format(R"({{"seed":{},"rollout_seed":{}}})", config.train.seed,
                      config.data.rollout_seed),
          R"({"tandem":"0.1.0"})"};
}

StepRecord to_record(const RlStep& step) {
  StepRecord record;
  record.step = step.metrics.step;
  record.metrics_json = to_json_line(step.metrics);
  record.evals = step.evals;
  for (const Sample& sample : step.samples) {
    record.samples.push_back(to_record(sample));
  }
  for (std::int64_t i = 0; i < std::min(kStoredEvalSamples, isize(step.eval_samples)); ++i) {
    SampleRecord& sample = record.samples.emplace_back(to_record(step.eval_samples[usize(i)]));
    sample.split = "eval";
  }
  return record;
}

/// The run's parts; members in the order they depend on each other.
struct RlRun {
  RlConfig config;
  RunFolder folder;
  LoadedModel loaded;
  std::unique_ptr<Model> reference;
  std::vector<Problem> train_problems;
  std::vector<Problem> eval_problems;
  std::unique_ptr<RlTrainer> trainer;

  /// Saves, commits, publishes: in this order, so that a crash loses at most the step in flight.
  /// `stopping`: the run ends here, so nothing but this save can keep the step.
  void keep(RunStore& store, const RlStep& step, bool stopping) const {
    const bool due = stopping || !config.checkpoint.save_interval ||
                     step.metrics.step % *config.checkpoint.save_interval == 0 ||
                     step.metrics.step == trainer->planned_steps();
    if (due) {
      save(step.metrics.step);
    }
    store.commit_step(to_record(step));
    if (due) {
      folder.checkpoints.publish(step.metrics.step);
    }
  }
  void save(std::int64_t step) const {
    const Optimizer& optimizer = trainer->optimizer();
    folder.checkpoints.write(
        {step, optimizer.num_steps(), optimizer.num_skipped(), trainer->weight_version(),
         trainer->data_offset(), folder.fingerprint},
        loaded.model->parameters(), optimizer, folder.source_dir);
  }
};

Expected<RlRun> prepare(const ExecCtx& ctx, const RlConfig& config, RunFolder folder) {
  auto loaded = load_trainable(ctx, folder.source_dir);
  if (!loaded.ok()) {
    return loaded.failure();
  }
  const JsonlKeys keys{config.data.input_key, config.data.label_key};
  auto train_problems = load_problems(config.data.prompt_data, keys, *loaded->tokenizer);
  if (!train_problems.ok()) {
    return train_problems.failure();
  }
  std::vector<Problem> eval_problems;
  if (!config.eval.eval_prompt_data.empty()) {
    auto problems = load_problems(config.eval.eval_prompt_data, keys, *loaded->tokenizer);
    if (!problems.ok()) {
      return problems.failure();
    }
    eval_problems = *std::move(problems);
  }
  std::unique_ptr<Model> reference;
  if (config.algo.kl_loss_coef != 0.0 || config.algo.kl_coef != 0.0) {
    const std::string dir =
        config.checkpoint.ref_load.empty() ? folder.source_dir : config.checkpoint.ref_load;
    auto model = load_frozen(ctx, dir);
    if (!model.ok()) {
      return model.failure();
    }
    reference = *std::move(model);
  }
  RlRun run{config,
            std::move(folder),
            *std::move(loaded),
            std::move(reference),
            *std::move(train_problems),
            std::move(eval_problems),
            nullptr};
  return run;
}

Status write_run_report(const RlRun& run, const std::string& path) {
  const auto report = load_report_run(run.folder.dir);
  if (!report.ok()) {
    return report.failure();
  }
  write_report(path, std::span(&*report, 1),
               {.title = "Run " + run.config.run.name, .explanation = run.config.run.note});
  return Ok{};
}

}  // namespace

Expected<RunResult> run_rl(const ExecCtx& ctx, const Resolved<RlConfig>& resolved,
                           const RunOptions& options, const RlObserver& observer) {
  const RlConfig& config = resolved.config;
  auto folder =
      open_run_folder(config.model, config.run, config.checkpoint,
                      static_cast<std::uint64_t>(config.train.seed), resolved.text(), options);
  if (!folder.ok()) {
    return folder.failure();
  }
  StartGuard guard(*folder);
  auto prepared = prepare(ctx, config, *std::move(folder));
  if (!prepared.ok()) {
    return prepared.failure();
  }
  RlRun run = *std::move(prepared);
  run.trainer = std::make_unique<RlTrainer>(ctx, *run.loaded.model, run.reference.get(),
                                            *run.loaded.tokenizer, run.config, run.train_problems,
                                            run.eval_problems);
  RlTrainer& trainer = *run.trainer;
  trainer.set_progress(observer.on_progress);

  const auto latest = run.folder.checkpoints.latest();
  const auto state = restore_latest(run.folder, *run.loaded.model, trainer.optimizer());
  if (!state.ok()) {
    return state.failure();
  }
  auto store = options.resume ? RunStore::open(run.folder.dir)
                              : RunStore::create(run.folder.dir, run_info(resolved));
  if (!store.ok()) {
    return store.failure();
  }
  if (latest) {
    store->truncate_after(state->step);
    trainer.resume_after(state->step, state->data_offset, state->weight_version);
  } else {
    store->truncate_after(-1);
  }
  guard.started();
  if (observer.on_start) {
    observer.on_start(trainer.planned_steps(), resolved.text(),
                      trainer.engine().memory_plan().to_string());
  }

  const auto finish_step = [&](const RlStep& step) {
    const bool stopping = options.stop_requested();
    run.keep(*store, step, stopping);
    if (observer.on_step) {
      observer.on_step(step);
    }
    return stopping;
  };
  if (!latest && !run.eval_problems.empty() && !run.config.eval.skip_eval_before_train &&
      finish_step(trainer.evaluate_before_training())) {
    return RunResult{RunEnd::kStopped, run.folder.dir, "", ""};
  }
  while (trainer.num_steps() < trainer.planned_steps()) {
    if (finish_step(trainer.step()) && trainer.num_steps() < trainer.planned_steps()) {
      return RunResult{RunEnd::kStopped, run.folder.dir, "", ""};
    }
  }
  const std::string model_dir =
      export_result(run.folder, run.config.checkpoint.save_hf, run.loaded.model->parameters());
  const std::string report_path = run.folder.dir + "/report.html";
  if (const Status status = write_run_report(run, report_path); !status.ok()) {
    return status.failure();
  }
  return RunResult{RunEnd::kFinished, run.folder.dir, model_dir, report_path};
}

}  // namespace tandem
