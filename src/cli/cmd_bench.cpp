// tandem bench — what a model does on a device: one decode step, or the engine end to end.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/step_bench.h"
#include "core/checked_cast.h"
#include "core/rng.h"
#include "core/timing.h"
#include "models/registry.h"

namespace tandem::cli {
namespace {

struct BenchFlags {
  std::string model;
  std::string load_format = "auto";
  std::string experts = "nvfp4";
  std::int64_t num_layers = 0;
  std::vector<std::int64_t> batches{1, 16, 64};
  std::vector<std::int64_t> contexts{4096};
  std::int64_t prompt = 128;
  std::int64_t tokens = 64;
  std::vector<std::int64_t> prefills{512, 4096};
  std::optional<LatentFormat> kv_cache_dtype = {};
  bool json = false;
};

Expected<std::unique_ptr<Model>> load(const ExecCtx& ctx, const BenchFlags& flags) {
  LoadOptions options;
  options.num_layers = flags.num_layers;
  if (flags.load_format == "dummy") {
    options.dummy_experts = flags.experts;
  }
  return load_model(ctx, flags.model, options);
}

/// One row of a table: text for people, or JSON, one object a line.
void print_row(const BenchFlags& flags, const std::string& text,
               const nlohmann::ordered_json& row) {
  write_out(flags.json ? row.dump() + "\n" : text);
}

Expected<ExitCode> run_step(const BenchFlags& flags, const GlobalOptions& global) {
  Runtime runtime(global, global.threads);
  const ExecCtx& ctx = runtime.ctx();
  auto model = load(ctx, flags);
  if (!model) {
    return model.failure();
  }
  const auto cache_spec = cache_spec_for(**model, flags.kv_cache_dtype);
  if (!cache_spec) {
    return cache_spec.failure();
  }
  const double roof = copy_bandwidth(*ctx.device);
  if (!flags.json) {
    print_out("weights {:.2f} GB; copy bandwidth {:.0f} GB/s, the roof below\n",
              1e-9 * static_cast<double>((*model)->footprint().weight_bytes), 1e-9 * roof);
    print_out("{:>6} {:>8} {:>10} {:>10} {:>10} {:>10} {:>8} {:>7}\n", "batch", "context",
              "step us", "tok/s", "weights GB", "cache GB", "x roof", "launches");
  }
  for (const std::int64_t context : flags.contexts) {
    for (const std::int64_t batch : flags.batches) {
      StepBench bench(ctx, **model, *cache_spec, batch, context);
      const StepFigures step = bench.run(20);
      const double rate = static_cast<double>(batch) / step.seconds;
      const double ratio = step.seconds * roof / (step.weight_bytes + step.cache_bytes);
      print_row(flags,
                fmt::format("{:>6} {:>8} {:>10.1f} {:>10.1f} {:>10.3f} {:>10.3f} {:>8.2f} {:>7}\n",
                            batch, context, 1e6 * step.seconds, rate, 1e-9 * step.weight_bytes,
                            1e-9 * step.cache_bytes, ratio, step.num_ops),
                {{"batch", batch},
                 {"context", context},
                 {"step_us", 1e6 * step.seconds},
                 {"tokens_per_s", rate},
                 {"weight_bytes", step.weight_bytes},
                 {"cache_bytes", step.cache_bytes},
                 {"copy_bytes_per_s", roof},
                 {"times_roof", ratio},
                 {"launches", step.num_ops}});
    }
  }
  return kExitOk;
}

Request random_request(const Model& model, std::int64_t prompt, std::int64_t tokens,
                       std::uint64_t id) {
  Request request;
  Rng rng(mix_key({id, 0xBE7C}));
  request.prompt.resize(usize(prompt));
  std::ranges::generate(request.prompt, [&] {
    return static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(model.vocab_size())));
  });
  request.max_new_tokens = tokens;
  request.sequence_id = id;
  return request;
}

/// Prompt tokens per second from submission to the first token, of the last of three rounds.
double prefill_rate(const ExecCtx& ctx, const Model& model, const BenchFlags& flags,
                    std::int64_t tokens) {
  EngineOptions options;
  options.kv_cache_dtype = flags.kv_cache_dtype;
  options.max_batch_tokens = tokens;
  options.max_running_seqs = 1;
  options.max_seq_len = tokens + 1;
  options.page_size = 64;
  Engine engine(model, ctx, options);
  double seconds = 0;
  for (std::uint64_t round = 0; round < 3; ++round) {
    static_cast<void>(engine.submit(random_request(model, tokens, 1, round)).value_or_throw());
    const auto start = Clock::now();
    engine.run_until_idle();
    seconds = seconds_since(start);
  }
  return static_cast<double>(tokens) / seconds;
}

struct DecodeFigures {
  double tokens_per_s = 0;
  double step_us = 0;  // from the call to its return, the device's time within
};

/// Of the steps in which all sequences decode.
DecodeFigures decode_rate(const ExecCtx& ctx, const Model& model, const BenchFlags& flags,
                          std::int64_t batch) {
  EngineOptions options;
  options.kv_cache_dtype = flags.kv_cache_dtype;
  options.max_batch_tokens = std::max<std::int64_t>(batch, 512);
  options.max_running_seqs = batch;
  options.max_seq_len = flags.prompt + flags.tokens + 2;
  options.page_size = 64;
  Engine engine(model, ctx, options);
  std::vector<double> steps;
  for (std::uint64_t round = 0; round < 2; ++round) {  // in the first, steps are recorded
    steps.clear();
    for (std::int64_t b = 0; b < batch; ++b) {
      Request request = random_request(model, flags.prompt, flags.tokens + 1,
                                       round * 1000 + static_cast<std::uint64_t>(b));
      static_cast<void>(engine.submit(std::move(request)).value_or_throw());
    }
    while (engine.has_work()) {
      const std::int64_t before = engine.stats().decode_tokens;
      const auto start = Clock::now();
      static_cast<void>(engine.step());
      const double seconds = seconds_since(start);
      if (engine.stats().decode_tokens - before == batch) {
        steps.push_back(seconds);
      }
    }
  }
  const double step_s = median(std::move(steps));
  return {static_cast<double>(batch) / step_s, 1e6 * step_s};
}

Expected<ExitCode> run_engine(const BenchFlags& flags, const GlobalOptions& global) {
  Runtime runtime(global, global.threads);
  const ExecCtx& ctx = runtime.ctx();
  auto model = load(ctx, flags);
  if (!model) {
    return model.failure();
  }
  for (const std::int64_t tokens : flags.prefills) {
    const double rate = prefill_rate(ctx, **model, flags, tokens);
    print_row(flags, fmt::format("prefill {:>6} tokens {:>12.1f} tok/s\n", tokens, rate),
              {{"prefill", tokens}, {"tokens_per_s", rate}});
  }
  for (const std::int64_t batch : flags.batches) {
    const DecodeFigures decode = decode_rate(ctx, **model, flags, batch);
    print_row(flags,
              fmt::format("decode batch {:>4}   {:>12.1f} tok/s {:>10.1f} us a step\n", batch,
                          decode.tokens_per_s, decode.step_us),
              {{"decode_batch", batch},
               {"tokens_per_s", decode.tokens_per_s},
               {"step_us", decode.step_us}});
  }
  return kExitOk;
}

void add_model_flags(CLI::App& app, BenchFlags& flags) {
  app.add_option("MODEL", flags.model,
                 "Checkpoint folder; with --load-format dummy a folder with a "
                 "config.json or a preset's name")
      ->required();
  app.add_option("--load-format", flags.load_format,
                 "auto, or dummy: real shapes with made-up numbers")
      ->check(CLI::IsMember({"auto", "dummy"}))
      ->capture_default_str();
  app.add_option("--experts", flags.experts, "Format of dummy experts")
      ->check(CLI::IsMember({"bf16", "mxfp4", "nvfp4"}))
      ->capture_default_str();
  app.add_option("--num-layers", flags.num_layers, "Only the first so many layers; 0 is all")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--batch", flags.batches, "Sequences of a decode step")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  add_kv_cache_dtype(app, flags.kv_cache_dtype);
  app.add_flag("--json", flags.json, "One JSON object a row");
}

}  // namespace

void add_bench(CommandLine& line) {
  CLI::App* bench = line.add("bench", "Measure a model on a device");
  bench->require_subcommand(1);
  const auto flags = std::make_shared<BenchFlags>();
  const auto add = [&](const std::string& name, const std::string& text, auto run) {
    CLI::App* command = bench->add_subcommand(name, text);
    add_global_options(*command, line.global);
    add_model_flags(*command, *flags);
    command->callback([&line, flags, run] {
      line.action = [&line, flags, run] { return run(*flags, line.global); };
    });
    return command;
  };
  add("step", "One decode step at given batches and contexts, against the bytes it must move",
      run_step)
      ->add_option("--context", flags->contexts, "Cached tokens a sequence")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  CLI::App* engine = add("engine", "Prefill and decode through the engine", run_engine);
  engine->add_option("--prefill", flags->prefills, "Prompt lengths")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  engine->add_option("--prompt", flags->prompt, "Prompt before decoding")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  engine->add_option("--tokens", flags->tokens, "Decoded tokens a sequence")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
}

}  // namespace tandem::cli
