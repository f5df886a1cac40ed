// common.h — what every subcommand shares: exit codes, global options, the machine it runs on, and
// output that notices a closed pipe or a full disk.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/backend.h"
#include "cli/interrupts.h"
#include "core/arena.h"
#include "core/error.h"
#include "core/log.h"
#include "core/progress.h"
#include "core/thread_pool.h"
#include "engine/engine.h"
#include "models/model.h"
#include "ops/exec_ctx.h"
#include "text/tokenizer.h"

namespace tandem::cli {

enum ExitCode : int {
  kExitOk = 0,
  kExitBadInput = 1,     // a Failure: file, config or request
  kExitUsage = 2,        // the command line itself
  kExitEnvironment = 3,  // a thrown Error: disk, memory
  kExitInterrupted = kInterruptedCode
};

/// Options of `tandem` itself, which every subcommand takes too.
struct GlobalOptions {
  int threads = 0;  // 0: one per hardware thread
  bool threads_given = false;
  LogLevel log_level = LogLevel::kWarn;
  bool profile = false;
  DeviceOptions device;
};

/// Standard output went away (`tandem generate ... | head`). Not an error worth a message.
struct OutputClosed {};

/// Writes to standard output at once. Errors: throws OutputClosed for a closed pipe, Error else.
void write_out(std::string_view text);
template <typename... Args>
void print_out(fmt::format_string<Args...> format, Args&&... args) {
  write_out(fmt::format(format, std::forward<Args>(args)...));
}
/// Writes to standard error; failing to do so is ignored.
void write_err(std::string_view text);

/// A progress bar on standard error that fits what standard error is.
[[nodiscard]] ProgressBar make_progress_bar();
[[nodiscard]] bool stdout_is_terminal();

/// Thread pool, memory and backend for one command.
class Runtime {
 public:
  /// `threads` 0: one per hardware thread.
  Runtime(const GlobalOptions& options, int threads);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  /// Prints the profile to standard error when asked for.
  ~Runtime();

  [[nodiscard]] const ExecCtx& ctx() const { return ctx_; }

 private:
  Backend backend_;
  ThreadPool pool_;
  Arena workspace_;
  Profiler profiler_;
  ExecCtx ctx_;
  bool print_profile_;
};

/// The memory plan: to standard error where memory is planned, else to the log.
void announce(const Engine& engine);

/// A model with the tokenizer beside it, checked against each other.
struct LoadedModel {
  std::unique_ptr<Model> model;
  std::unique_ptr<Tokenizer> tokenizer;
};
Expected<LoadedModel> load_model_and_tokenizer(const ExecCtx& ctx, const std::string& dir);

/// Sampling flags of `generate` and `chat`.
struct SamplingFlags {
  SamplingParams params;
  std::int64_t max_new_tokens = 256;
  std::uint64_t seed = 0;
};
void add_sampling_flags(CLI::App& app, SamplingFlags& flags);

/// --kv-cache-dtype: none is "auto".
void add_kv_cache_dtype(CLI::App& app, std::optional<LatentFormat>& dtype);

/// What the chosen subcommand does, filled by its CLI11 callback and run by main(). A Failure ends
/// with kExitBadInput.
using Action = std::function<Expected<ExitCode>()>;

/// Where subcommands register. All of it outlives the run of the action.
struct CommandLine {
  CLI::App& app;
  GlobalOptions& global;
  Interrupts& interrupts;
  Action& action;

  /// A subcommand with the global options on it.
  CLI::App* add(const std::string& name, const std::string& description);
};

void add_global_options(CLI::App& app, GlobalOptions& options);

// One a file cmd_<name>.cpp.
void add_init(CommandLine& line);
void add_inspect(CommandLine& line);
void add_generate(CommandLine& line);
void add_chat(CommandLine& line);
void add_sft(CommandLine& line);
void add_rl(CommandLine& line);
void add_bench(CommandLine& line);
void add_report(CommandLine& line);
void add_demo_data(CommandLine& line);
void add_serve(CommandLine& line);

}  // namespace tandem::cli
