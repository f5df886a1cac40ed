#include "cli/common.h"

#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include <unistd.h>

#include "models/registry.h"

namespace tandem::cli {

void write_out(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EPIPE) {
      throw OutputClosed{};
    } else if (errno != EINTR) {
      throw_error("standard output: cannot write: {}", std::strerror(errno));
    }
  }
}

void write_err(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

ProgressBar make_progress_bar() {
  const bool terminal = ::isatty(STDERR_FILENO) != 0;
  return {terminal ? ProgressStyle::kTerminal : ProgressStyle::kLines, write_err};
}

bool stdout_is_terminal() {
  return ::isatty(STDOUT_FILENO) != 0;
}

Runtime::Runtime(const GlobalOptions& options, int threads)
    : backend_(open_backend(options.device)),
      pool_(threads),
      workspace_(backend_.workspace()),
      print_profile_(options.profile) {
  ctx_.ops = backend_.ops;
  ctx_.device = &backend_.memory();
  ctx_.pool = &pool_;
  ctx_.workspace = &workspace_;
  ctx_.profiler = options.profile ? &profiler_ : nullptr;
}

Runtime::~Runtime() {
  if (print_profile_) {
    write_err(profiler_.table());
  }
}

void announce(const Engine& engine) {
  const std::string plan = engine.memory_plan().to_string();
  if (engine.memory_plan().device) {
    write_err(fmt::format("memory plan\n{}", plan));
  } else {
    log_info("engine.memory_plan", "{}", plan);
  }
}

Expected<LoadedModel> load_model_and_tokenizer(const ExecCtx& ctx, const std::string& dir) {
  auto tokenizer = load_tokenizer(dir);
  if (!tokenizer) {
    return tokenizer.failure();
  }
  auto model = load_model(ctx, dir, {});
  if (!model) {
    return model.failure();
  }
  const std::int64_t num_tokens = (*tokenizer)->vocab_size();
  if (num_tokens > (*model)->vocab_size()) {
    return fail("{}: the tokenizer has {} tokens, expected at most the model's vocab_size {}", dir,
                num_tokens, (*model)->vocab_size());
  }
  return LoadedModel{*std::move(model), *std::move(tokenizer)};
}

void add_kv_cache_dtype(CLI::App& app, std::optional<LatentFormat>& dtype) {
  const auto set = [&dtype](const std::string& name) {
    dtype = {};
    for (const LatentFormat format :
         {LatentFormat::kF32, LatentFormat::kBF16, LatentFormat::kFp8}) {
      if (name == latent_format_name(format)) {
        dtype = format;
      }
    }
  };
  app.add_option_function<std::string>("--kv-cache-dtype", set,
                                       "Elements of the attention cache. auto: fp32 for models "
                                       "with fp32 matrices, else bf16; fp8 "
                                       "takes half of bf16's memory and is coarser")
      ->check(CLI::IsMember({"auto", "fp32", "bf16", "fp8"}))
      ->default_str("auto");
}

void add_sampling_flags(CLI::App& app, SamplingFlags& flags) {
  app.add_option("--max-new-tokens", flags.max_new_tokens, "Longest response, in tokens")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--temperature", flags.params.temperature, "0 always takes the likeliest token")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--top-k", flags.params.top_k, "Keep the k likeliest tokens; 0 is off")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--top-p", flags.params.top_p,
                 "Keep the likeliest tokens that hold this probability; 1 is off")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--min-p", flags.params.min_p,
                 "Drop tokens below this share of the likeliest one's probability; 0 is off")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "Same seed, same text, whatever runs beside it")
      ->capture_default_str();
}

void add_global_options(CLI::App& app, GlobalOptions& options) {
  const std::map<std::string, LogLevel> levels{{"debug", LogLevel::kDebug},
                                               {"info", LogLevel::kInfo},
                                               {"warn", LogLevel::kWarn},
                                               {"error", LogLevel::kError},
                                               {"off", LogLevel::kOff}};
  app.add_option_function<int>(
         "--threads",
         [&options](int threads) {
           options.threads = threads;
           options.threads_given = true;
         },
         "Threads to compute with; 0 is one per hardware thread")
      ->check(CLI::Range(0, 1024))
      ->group("Everywhere");
  app.add_option_function<std::string>(
         "--log-level",
         [&options, levels](const std::string& name) { options.log_level = levels.at(name); },
         "debug, info, warn (default), error or off; to standard error")
      ->check(CLI::IsMember({"debug", "info", "warn", "error", "off"}))
      ->group("Everywhere");
  app.add_flag("--profile", options.profile,
               "Print the time spent in each operation to standard error at the end")
      ->group("Everywhere");
  app.add_option("--device", options.device.name, "cpu (default), cuda or cuda:N for GPU N")
      ->check(CLI::Validator(check_device_name, ""))
      ->group("Everywhere");
  app.add_option("--device-memory", options.device.memory_gib,
                 "On a GPU: allocate at most so many GiB; 0 (default) is all that is free")
      ->check(CLI::NonNegativeNumber)
      ->group("Everywhere");
  app.add_flag(
         "--deterministic", options.device.deterministic,
         "On a GPU: multiply every weight in fp32 in the CPU's order, so that training repeats "
         "the sampler's log-probabilities bit for bit; slower")
      ->group("Everywhere");
  app.add_flag("--no-dependent-launch", options.device.no_dependent_launch,
               "On a GPU: start a kernel only when the one before it has ended; slower, to compare")
      ->group("Everywhere");
}

CLI::App* CommandLine::add(const std::string& name, const std::string& description) {
  CLI::App* command = app.add_subcommand(name, description);
  add_global_options(*command, global);
  return command;
}

}  // namespace tandem::cli
