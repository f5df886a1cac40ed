// tandem report — one page, and a short table, that compare runs.
#include <filesystem>

#include "cli/common.h"
#include "cli/training.h"
#include "rl/report.h"

namespace tandem::cli {
namespace {

struct ReportFlags {
  std::vector<std::string> runs;
  std::string out;
};

/// First and last value of a metric over a run's steps, where it was measured.
struct Ends {
  std::optional<double> first;
  std::optional<double> last;
};

Ends ends_of(const ReportRun& run, std::optional<double> StepMetrics::*metric) {
  Ends ends;
  for (const StepMetrics& step : run.steps) {
    if (step.*metric) {
      ends.first = ends.first ? ends.first : step.*metric;
      ends.last = step.*metric;
    }
  }
  return ends;
}

std::string table_row(const ReportRun& run) {
  const Ends reward = ends_of(run, &StepMetrics::reward_mean);
  const Ends eval = ends_of(run, &StepMetrics::eval_accuracy);
  std::optional<double> mismatch;
  double seconds = 0;
  for (const StepMetrics& step : run.steps) {
    if (step.logprob_mismatch_max) {
      mismatch = std::max(mismatch.value_or(0.0), *step.logprob_mismatch_max);
    }
    seconds += step.time_total_s.value_or(0.0);
  }
  return fmt::format("{:<24} {:>6} {:>8} {:>8} {:>8} {:>8} {:>12} {:>9}\n", run.name,
                     run.steps.empty() ? 0 : run.steps.back().step, show_value(reward.first, 3),
                     show_value(reward.last, 3), show_value(eval.first, 3),
                     show_value(eval.last, 3), mismatch ? fmt::format("{:g}", *mismatch) : "-",
                     format_duration(seconds));
}

Expected<ExitCode> run_report(const ReportFlags& flags) {
  std::vector<ReportRun> runs;
  for (const std::string& dir : flags.runs) {
    auto run = load_report_run(dir);
    if (!run) {
      return run.failure();
    }
    runs.push_back(*std::move(run));
  }
  ReportOptions options;
  if (runs.size() > 1) {
    options.title = "Comparison of runs";
  }
  std::string out = flags.out;
  if (out.empty()) {
    out = runs.size() == 1 ? (std::filesystem::path(flags.runs[0]) / "report.html").string()
                           : "report.html";
  }
  write_report(out, runs, options);
  print_out("{:<24} {:>6} {:>8} {:>8} {:>8} {:>8} {:>12} {:>9}\n", "run", "steps", "reward",
            "-> last", "eval", "-> last", "max mismatch", "time");
  for (const ReportRun& run : runs) {
    write_out(table_row(run));
  }
  print_out("page: {}\n", out);
  return kExitOk;
}

}  // namespace

void add_report(CommandLine& line) {
  CLI::App* command = line.add("report", "Compare runs: a table, and a page for the browser");
  auto flags = std::make_shared<ReportFlags>();
  command->add_option("RUN", flags->runs, "Folders of runs made by tandem rl")->required();
  command->add_option("--out", flags->out,
                      "The page; default: RUN/report.html, or ./report.html for several runs");
  command->callback([&line, flags] { line.action = [flags] { return run_report(*flags); }; });
}

}  // namespace tandem::cli
