#include "cli/serve_bench.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/checked_cast.h"
#include "io/atomic_file.h"
#include "server/load/load_report.h"
#include "server/load/load_run.h"

namespace tandem::cli {
namespace {

struct ServeBenchFlags {
  std::string url = "http://127.0.0.1:30000";
  std::string endpoint = "completions";
  std::string model;
  std::string api_key;
  load::WorkloadOptions workload;
  std::int64_t concurrency = 0;
  std::optional<double> request_rate;
  bool replay = false;
  double temperature = 0;
  bool stops_at_eos = false;
  bool skips_warm_up = false;
  bool flush_cache = false;
  double timeout_s = 600;
  std::vector<std::string> goodput;
  std::string json;
  std::string html;
};

/// The first failed request as a Failure.
Status check_any_completed(const load::LoadReport& report) {
  if (report.summary.completed > 0 || report.records.empty()) {
    return Ok{};
  }
  const load::RequestRecord& first = report.records.front();
  return fail("no request was completed; the first: {}", first.error);
}

/// One request that is not measured. Errors: a Failure with what went wrong.
Status warm_up(const load::RunOptions& options, const load::WorkloadOptions& workload_options,
               const load::Workload& workload, const std::atomic<bool>& stop) {
  load::RunOptions once = options;
  once.request_rate = {};
  once.uses_arrivals = false;
  load::Workload single;
  single.conversations.push_back({{load::warm_up_turn(workload_options, workload)}});
  const auto records = load::run_load(once, single, stop, [](const load::RunProgress&) {});
  if (!records) {
    return records.failure();
  }
  const load::RequestRecord& record = records->front();
  if (!record.is_complete() && !stop) {
    return fail("warm-up request to {}{}: {}", options.target.url(),
                load::path_of(options.form.endpoint), record.error);
  }
  return Ok{};
}

std::string arrivals_text(const ServeBenchFlags& flags) {
  std::string text;
  if (flags.request_rate) {
    text = fmt::format("Poisson, {:g} a second", *flags.request_rate);
  } else if (flags.replay) {
    text = "at the times of the file";
  }
  if (flags.concurrency > 0) {
    text += fmt::format("{}at most {} at once", text.empty() ? "" : ", ", flags.concurrency);
  }
  return text;
}

load::LoadReport report_of(const ServeBenchFlags& flags, const load::RunOptions& options,
                           std::vector<load::RequestRecord> records, const load::Slo& slo) {
  const load::WorkloadOptions& made = flags.workload;
  load::LoadReport report;
  report.setting = {
      {"endpoint", options.target.url() + std::string(load::path_of(options.form.endpoint))},
      {"model", options.form.model.empty() ? "-" : options.form.model},
      {"dataset", made.dataset == "jsonl" ? made.path : made.dataset},
      {"arrivals", arrivals_text(flags)}};
  const auto add = [&](const char* name, std::string value) {
    report.setting.emplace_back(name, std::move(value));
  };
  add("requests asked", fmt::format("{}", records.size()));
  if (made.dataset == "shared-prefix") {
    add("prompts", fmt::format("{} prefixes of {}, questions of {}", made.num_groups,
                               made.system_length(), made.question_len));
  } else if (made.dataset != "jsonl") {
    add("input length", fmt::format("{}", made.input_length()));
  }
  if (made.dataset == "multi-turn") {
    add("turns", fmt::format("{}", made.turns));
  }
  add("output length", fmt::format("{}", made.output_length()));
  if (made.dataset != "jsonl" && made.dataset != "sharegpt-like") {
    add("range ratio", fmt::format("{:g}", made.range_ratio));
  }
  add("seed", fmt::format("{}", made.seed));
  add("ignore_eos", options.form.ignore_eos ? "yes" : "no");
  add("temperature", fmt::format("{:g}", options.form.temperature));
  report.slo = slo;
  report.has_exact_itl = options.form.endpoint == load::Endpoint::kGenerate;
  report.summary = load::summarize(records, slo);
  report.records = std::move(records);
  return report;
}

void write_report(const ServeBenchFlags& flags, const load::LoadReport& report) {
  if (flags.json == "-") {
    write_err(load::to_table(report));
    write_out(load::to_json(report));
  } else {
    write_out(load::to_table(report));
    if (!flags.json.empty()) {
      write_file_atomic(flags.json, std::string_view(load::to_json(report)));
    }
  }
  if (!flags.html.empty()) {
    write_file_atomic(flags.html, std::string_view(load::to_page(report)));
    write_err(fmt::format("page: {}\n", flags.html));
  }
}

/// Errors: a Failure for flags that do not fit, or a server that does not say its model's name.
Expected<load::RunOptions> run_options(const ServeBenchFlags& flags, load::Endpoint endpoint) {
  auto target = load::parse_target(flags.url);
  if (!target) {
    return target.failure();
  }
  load::RunOptions options;
  options.target = *std::move(target);
  options.form = {endpoint, flags.model, !flags.stops_at_eos, flags.temperature};
  options.api_key = flags.api_key;
  options.max_concurrency = flags.concurrency;
  options.request_rate = flags.request_rate;
  options.uses_arrivals = flags.replay;
  options.vocab_size = flags.workload.vocab_size;
  options.seed = flags.workload.seed;
  options.timeout_s = flags.timeout_s;
  return options;
}

/// Before the load: the model's name, a warm-up, an empty cache.
Status prepare(const ServeBenchFlags& flags, load::RunOptions& options,
               const load::WorkloadOptions& workload_options, const load::Workload& workload,
               const std::atomic<bool>& stop) {
  if (options.form.model.empty() && options.form.endpoint != load::Endpoint::kGenerate) {
    auto model = load::first_model(options);
    if (!model) {
      return model.failure();
    }
    options.form.model = *std::move(model);
  }
  if (!flags.skips_warm_up) {
    if (Status warm = warm_up(options, workload_options, workload, stop); !warm) {
      return warm;
    }
  }
  return flags.flush_cache && !stop ? load::flush_cache(options) : Ok{};
}

Expected<ExitCode> run_serve_bench(const ServeBenchFlags& flags, Interrupts& interrupts) {
  const auto endpoint = load::parse_endpoint(flags.endpoint);
  if (!endpoint) {
    return endpoint.failure();
  }
  load::WorkloadOptions workload_options = flags.workload;
  workload_options.endpoint = *endpoint;
  const auto slo = load::parse_slo(flags.goodput);
  if (!slo) {
    return slo.failure();
  }
  auto options = run_options(flags, *endpoint);
  if (!options) {
    return options.failure();
  }
  const auto workload = load::make_workload(workload_options);
  if (!workload) {
    return workload.failure();
  }
  if (flags.replay && !workload->has_arrivals) {
    return fail("--replay: expected --dataset jsonl with t, in seconds, on every line");
  }
  const Interrupts::Graceful graceful(interrupts,
                                      "tandem: stopping; what is measured so far follows");
  if (Status ready = prepare(flags, *options, workload_options, *workload, interrupts.stop());
      !ready) {
    return ready.failure();
  }
  ProgressBar bar = make_progress_bar();
  bar.start("requests", workload->num_requests());
  auto records = load::run_load(
      *options, *workload, interrupts.stop(), [&](const load::RunProgress& progress) {
        bar.update(progress.finished,
                   fmt::format("{} under way, {} failed", progress.running, progress.failed));
      });
  bar.finish();
  if (!records) {
    return records.failure();
  }
  const load::LoadReport report = report_of(flags, *options, *std::move(records), *slo);
  write_report(flags, report);
  if (interrupts.stop()) {
    return kExitInterrupted;
  }
  if (Status some = check_any_completed(report); !some) {
    return some.failure();
  }
  return kExitOk;
}

void add_workload_flags(CLI::App& command, load::WorkloadOptions& workload) {
  command.add_option("--dataset", workload.dataset, "What is asked")
      ->check(
          CLI::IsMember({"random-ids", "shared-prefix", "multi-turn", "sharegpt-like", "jsonl"}))
      ->capture_default_str();
  command.add_option("--dataset-path", workload.path, "File of --dataset jsonl");
  command
      .add_option("--num-prompts", workload.num_prompts,
                  "Requests; of a file at most so many lines")
      ->capture_default_str();
  command.add_option("--input-len", workload.input_len,
                     "Prompt tokens (a turn, multi-turn); default 1024, mean 161 for "
                     "sharegpt-like. For chat: words");
  command.add_option("--output-len", workload.output_len,
                     "Tokens asked for; default 128, mean 338 for sharegpt-like");
  command
      .add_option("--range-ratio", workload.range_ratio,
                  "Lengths are uniform in [ratio * length, length]")
      ->capture_default_str();
  command.add_option("--groups", workload.num_groups, "shared-prefix: different prefixes")
      ->capture_default_str();
  command.add_option("--system-len", workload.system_len,
                     "shared-prefix: tokens of a prefix; default: the input length");
  command
      .add_option("--question-len", workload.question_len, "shared-prefix: tokens after the prefix")
      ->capture_default_str();
  command.add_option("--turns", workload.turns, "multi-turn: requests of a conversation")
      ->capture_default_str();
  command
      .add_option("--vocab-size", workload.vocab_size,
                  "Token ids are drawn from [0, so many); at most the model's")
      ->capture_default_str();
  command.add_option("--seed", workload.seed, "Of prompts, lengths and arrivals")
      ->capture_default_str();
}

void add_arrival_flags(CLI::App& command, ServeBenchFlags& flags) {
  auto* arrivals = command.add_option_group("Arrivals");
  CLI::Option* rate =
      arrivals
          ->add_option("--request-rate", flags.request_rate,
                       "Requests (multi-turn: conversations) begun a second, Poisson")
          ->check(CLI::PositiveNumber);
  arrivals
      ->add_option("--concurrency", flags.concurrency,
                   "Requests under way at once; beside another mode a limit")
      ->check(CLI::PositiveNumber);
  arrivals->add_flag("--replay", flags.replay, "jsonl: each request at its own time \"t\"")
      ->excludes(rate);
  arrivals->require_option(1, 2);
}

}  // namespace

void add_serve_bench(CommandLine& line, CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "serve", "Load a running server, tandem or another, and measure what its clients see");
  add_global_options(*command, line.global);
  const auto flags = std::make_shared<ServeBenchFlags>();
  command->add_option("--url", flags->url, "The server; a last /v1 is dropped")
      ->capture_default_str();
  command
      ->add_option("--endpoint", flags->endpoint,
                   "completions, chat (OpenAI's) or generate (SGLang's)")
      ->check(CLI::IsMember({"completions", "chat", "generate"}))
      ->capture_default_str();
  command->add_option("--model", flags->model, "Default: the first that /v1/models lists");
  command->add_option("--api-key", flags->api_key, "Sent as a bearer token");
  add_arrival_flags(*command, *flags);
  add_workload_flags(*command, flags->workload);
  command->add_option("--temperature", flags->temperature, "Of every request")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--no-ignore-eos", flags->stops_at_eos,
                    "Let answers end before --output-len; leaves the field ignore_eos out");
  command->add_flag("--no-warm-up", flags->skips_warm_up, "No request before those measured");
  command->add_flag("--flush-cache", flags->flush_cache,
                    "POST /flush_cache after the warm-up; needs a server that has it");
  command->add_option("--timeout", flags->timeout_s, "Seconds without a byte until a request fails")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--goodput", flags->goodput,
                   "Count requests within limits in ms: ttft:200 tpot:50 e2el:5000")
      ->expected(1, 3);
  command->add_option("--json", flags->json,
                      "All figures and requests into this file; - is standard output");
  command->add_option("--html", flags->html, "A page with distributions into this file");
  command->callback([&line, flags] {
    line.action = [&line, flags] { return run_serve_bench(*flags, line.interrupts); };
  });
}

}  // namespace tandem::cli
