// tandem sft — supervised fine-tuning from a config file.
#include "cli/training.h"

namespace tandem::cli {
namespace {

Expected<ExitCode> run_sft_command(const TrainFlags& flags, const GlobalOptions& global,
                                   Interrupts& interrupts) {
  if (flags.help_config) {
    write_out(describe_config<SftConfig>());
    return kExitOk;
  }
  const auto config = resolve<SftConfig>(flags, global);
  if (!config) {
    return config.failure();
  }
  Runtime runtime(global, checked_cast<int>(config->config.run.threads));
  ProgressBar bar = make_progress_bar();
  SftObserver observer;
  std::int64_t total_steps = 0;
  bool bar_started = false;
  double last_loss = 0;
  observer.on_start = [&](std::int64_t total, const std::string&) {
    total_steps = total;
    print_run_line(config_to_show(*config) + "\n");
  };
  observer.on_step = [&](const SftStep& step) {
    if (!bar_started) {  // a resumed run starts its bar where it continues
      bar_started = true;
      bar.start("sft", total_steps, step.step);
    }
    last_loss = step.loss;
    const double rate =
        step.seconds > 0 ? static_cast<double>(step.num_tokens) / step.seconds : 0.0;
    bar.update(step.step,
               fmt::format("loss {:.4f}  grad {:.2f}  lr {:.1e}  {:.0f} tok/s", step.loss,
                           step.optimizer.grad_norm, step.optimizer.lr, rate));
  };
  const Interrupts::Graceful graceful(
      interrupts, "tandem: finishing the step in flight; Ctrl-C again quits at once");
  const RunOptions options{flags.resume, &interrupts.stop()};
  const auto result = run_sft(runtime.ctx(), *config, options, observer);
  bar.finish();
  if (!result) {
    return result.failure();
  }
  if (bar_started) {
    print_run_line(fmt::format("sft: last loss {:.4f}\n", last_loss));
  }
  return finish_run(*result, "sft", flags);
}

}  // namespace

void add_sft(CommandLine& line) {
  CLI::App* command = line.add("sft", "Supervised fine-tuning, from a config file");
  auto flags = std::make_shared<TrainFlags>();
  add_train_flags(*command, *flags);
  command->callback([&line, flags, command] {
    if (flags->config.empty() && !flags->help_config) {
      throw CLI::RequiredError("CONFIG");
    }
    flags->overrides = command->remaining();
    line.action = [flags, &line] { return run_sft_command(*flags, line.global, line.interrupts); };
  });
}

}  // namespace tandem::cli
