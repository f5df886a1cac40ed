// training.h — what `sft` and `rl` share: their flags, the resolved config, and the end of a run.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "cli/common.h"
#include "core/checked_cast.h"
#include "rl/run_rl.h"
#include "train/run_sft.h"
#include "train/toml_config.h"

namespace tandem::cli {

struct TrainFlags {
  std::string config;
  bool resume = false;
  bool help_config = false;
  std::vector<std::string> overrides;  // words that are no options of ours
};

void add_train_flags(CLI::App& command, TrainFlags& flags);

/// The config of a run: file, then flags, then what follows from them. `--threads` sets
/// run.threads.
template <typename Config>
Expected<Resolved<Config>> resolve(const TrainFlags& flags, const GlobalOptions& global) {
  ConfigSources sources{flags.config, flags.overrides};
  if (global.threads_given) {
    sources.flags.push_back(fmt::format("--threads={}", global.threads));
  }
  auto resolved = tandem::load_config<Config>(sources);
  if (resolved && (resolved->config.run.threads < 0 || resolved->config.run.threads > 1024)) {
    return fail("run.threads = {}: expected 0 to 1024", resolved->config.run.threads);
  }
  return resolved;
}

/// The resolved config with the origin of each value: on a terminal only what differs from the
/// defaults; the run's folder keeps all of it.
template <typename Config>
std::string config_to_show(const Resolved<Config>& resolved) {
  if (!stdout_is_terminal()) {
    return resolved.text();
  }
  Config copy = resolved.config;
  std::vector<Field> fields = fields_of(copy);
  std::erase_if(fields, [&](const Field& field) {
    return !resolved.origins.contains(fmt::format("{}.{}", field.table, field.key));
  });
  return print_resolved(fields, resolved.origins);
}

/// Every key with its meaning, for --help-config.
template <typename Config>
std::string describe_config() {
  Config defaults;
  return describe_fields(fields_of(defaults));
}

/// Says where the results are and what to type next.
ExitCode finish_run(const RunResult& result, std::string_view command, const TrainFlags& flags);

/// Standard output of a run that must not die with its reader: a closed pipe is ignored.
void print_run_line(std::string_view line);

/// "0.4531", or "-" when it was not measured.
[[nodiscard]] std::string show_value(const std::optional<double>& value, int digits);

}  // namespace tandem::cli
