// tandem rl — reinforcement learning from a config file.
#include "cli/training.h"

namespace tandem::cli {
namespace {

/// One line a step; long enough to follow a run, short enough for 120 columns.
std::string step_line(const StepMetrics& m) {
  std::string line = fmt::format("step {:>4}", m.step);
  const auto add = [&line](std::string_view name, const std::optional<double>& value, int digits) {
    if (value) {
      line += fmt::format("  {} {}", name, show_value(value, digits));
    }
  };
  add("reward", m.reward_mean, 3);
  if (m.eval_accuracy) {
    line += fmt::format("  eval {:.1f}%", 100 * *m.eval_accuracy);
  }
  if (m.eval_accuracy_greedy) {
    line += fmt::format(" (greedy {:.1f}%)", 100 * *m.eval_accuracy_greedy);
  }
  add("entropy", m.entropy, 3);
  if (m.logprob_mismatch_max) {
    line += fmt::format("  mismatch {:g}", *m.logprob_mismatch_max);
  }
  add("len", m.response_tokens_mean, 1);
  if (m.rollout_tokens_per_s) {
    line += fmt::format("  tok/s {:.0f} out", *m.rollout_tokens_per_s);
  }
  if (m.train_tokens_per_s) {
    line += fmt::format(" {:.0f} train", *m.train_tokens_per_s);
  }
  if (m.time_total_s) {
    line += fmt::format("  {:.1f} s", *m.time_total_s);
  }
  return line;
}

/// What people see of a run: one line a step, and a bar over all steps that names the phase.
class RlScreen {
 public:
  explicit RlScreen(ProgressBar& bar) : bar_(bar) {}

  void start(std::int64_t total_steps, const std::string& config, const std::string& plan) {
    total_steps_ = total_steps;
    print_run_line(fmt::format("{}\nmemory plan\n{}\n", config, plan));
    bar_.start("rl", total_steps_);
  }

  void progress(std::string_view phase, std::int64_t done, std::int64_t total) {
    if (phase != phase_name_ || done < phase_done_) {  // a new phase, or the next one of its kind
      phase_name_ = phase;
      phase_.start(phase, total, done);
    }
    phase_done_ = done;
    phase_.update(done);
    bar_.update(last_step_, fmt::format("step {}: {} {}/{}, {}", last_step_ + 1, phase, done, total,
                                        format_duration(phase_.seconds_left())));
  }

  void step(const StepMetrics& metrics) {
    bar_.clear();
    print_run_line(step_line(metrics) + "\n");
    last_step_ = metrics.step;
    if (!has_step_) {  // start-up, first evaluation and resumed steps do not count for the speed
      has_step_ = true;
      bar_.start("rl", total_steps_, last_step_);
    }
    bar_.update(last_step_);
  }

 private:
  ProgressBar& bar_;
  ProgressBar phase_{ProgressStyle::kOff, [](std::string_view) {}};  // for its time left
  std::string phase_name_;
  std::int64_t phase_done_ = 0;
  std::int64_t total_steps_ = 0;
  std::int64_t last_step_ = 0;
  bool has_step_ = false;
};

Expected<ExitCode> run_rl_command(const TrainFlags& flags, const GlobalOptions& global,
                                  Interrupts& interrupts) {
  if (flags.help_config) {
    write_out(describe_config<RlConfig>());
    return kExitOk;
  }
  const auto config = resolve<RlConfig>(flags, global);
  if (!config) {
    return config.failure();
  }
  Runtime runtime(global, checked_cast<int>(config->config.run.threads));
  ProgressBar bar = make_progress_bar();
  RlScreen screen(bar);
  RlObserver observer;
  observer.on_start = [&](std::int64_t total, const std::string&, const std::string& plan) {
    screen.start(total, config_to_show(*config), plan);
  };
  observer.on_step = [&](const RlStep& step) { screen.step(step.metrics); };
  observer.on_progress = [&](std::string_view phase, std::int64_t done, std::int64_t total) {
    screen.progress(phase, done, total);
  };
  const Interrupts::Graceful graceful(
      interrupts, "tandem: finishing the step in flight; Ctrl-C again quits at once");
  const RunOptions options{flags.resume, &interrupts.stop()};
  const auto result = run_rl(runtime.ctx(), *config, options, observer);
  bar.finish();
  if (!result) {
    return result.failure();
  }
  return finish_run(*result, "rl", flags);
}

}  // namespace

void add_rl(CommandLine& line) {
  CLI::App* command = line.add("rl", "Reinforcement learning, from a config file");
  auto flags = std::make_shared<TrainFlags>();
  add_train_flags(*command, *flags);
  command->callback([&line, flags, command] {
    if (flags->config.empty() && !flags->help_config) {
      throw CLI::RequiredError("CONFIG");
    }
    flags->overrides = command->remaining();
    line.action = [flags, &line] { return run_rl_command(*flags, line.global, line.interrupts); };
  });
}

}  // namespace tandem::cli
