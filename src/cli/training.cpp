#include "cli/training.h"

namespace tandem::cli {

void add_train_flags(CLI::App& command, TrainFlags& flags) {
  command.add_option("CONFIG", flags.config, "TOML file; write it before any override");
  command.add_flag("--resume", flags.resume,
                   "Continue the run's folder; what was finished is kept, to the bit");
  command.add_flag("--help-config", flags.help_config,
                   "List every key of the config with its default and meaning");
  command.allow_extras();
  command.footer(
      "Any key can be set on the command line, over the file: --set table.key=value,\n"
      "or --key value with dashes for underscores (--lr 1e-4, --no-rollout-shuffle).");
}

ExitCode finish_run(const RunResult& result, std::string_view command, const TrainFlags& flags) {
  if (result.end == RunEnd::kStopped) {
    write_err(
        fmt::format("tandem: stopped; the finished steps are in {}\n"
                    "Continue with: tandem {} {} --resume{}{}\n",
                    result.run_dir, command, flags.config, flags.overrides.empty() ? "" : " ",
                    fmt::join(flags.overrides, " ")));
    return kExitInterrupted;
  }
  std::string text = fmt::format("\nrun     {}\nmodel   {}\n", result.run_dir, result.model_dir);
  if (!result.report_path.empty()) {
    text += fmt::format("report  {}\n", result.report_path);
  }
  print_run_line(text + fmt::format("Try it:  tandem chat {}\n", result.model_dir));
  return kExitOk;
}

void print_run_line(std::string_view line) {
  try {
    write_out(line);
  } catch (const OutputClosed&) {
    return;  // nobody reads any more; the run's files hold everything
  }
}

std::string show_value(const std::optional<double>& value, int digits) {
  return value ? fmt::format("{:.{}f}", *value, digits) : "-";
}

}  // namespace tandem::cli
