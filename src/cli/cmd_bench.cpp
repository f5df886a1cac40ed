// tandem bench — what a model does on a device: a decode step, a prompt, their kernels one by one,
// or the engine end to end; and what a running server does under load.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/engine_bench.h"
#include "cli/prefill_bench.h"
#include "cli/roofs.h"
#include "cli/serve_bench.h"
#include "cli/step_bench.h"
#include "core/checked_cast.h"
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
  std::int64_t new_tokens = 1;
  std::int64_t pieces = 0;
  std::int64_t check_pieces = 0;
  std::int64_t rounds = 3;
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

struct ModelAndCaches {
  std::unique_ptr<Model> model;
  CacheSpec cache_spec;
};

Expected<ModelAndCaches> load_with_caches(const ExecCtx& ctx, const BenchFlags& flags) {
  auto model = load(ctx, flags);
  if (!model) {
    return model.failure();
  }
  auto cache_spec = cache_spec_for(**model, flags.kv_cache_dtype);
  if (!cache_spec) {
    return cache_spec.failure();
  }
  return ModelAndCaches{std::move(*model), std::move(*cache_spec)};
}

/// One row of a table: text for people, or JSON, one object a line.
void print_row(const BenchFlags& flags, const std::string& text,
               const nlohmann::ordered_json& row) {
  write_out(flags.json ? row.dump() + "\n" : text);
}

Expected<ExitCode> run_decode(const BenchFlags& flags, const GlobalOptions& global) {
  Runtime runtime(global, global.threads);
  const ExecCtx& ctx = runtime.ctx();
  const auto loaded = load_with_caches(ctx, flags);
  if (!loaded) {
    return loaded.failure();
  }
  const auto& [model, cache_spec] = *loaded;
  const Roofs roofs = measure_roofs(ctx);
  const double roof = roofs.bytes_per_s;
  if (!flags.json) {
    print_out("weights {:.2f} GB on {}; the roof below: {}\n",
              1e-9 * static_cast<double>(model->footprint().weight_bytes), ctx.device->name(),
              describe(roofs, *ctx.device));
    print_out("{:>6} {:>8} {:>10} {:>10} {:>10} {:>10} {:>8} {:>7}\n", "batch", "context",
              "step us", "tok/s", "weights GB", "cache GB", "x roof", "launches");
  }
  for (const std::int64_t context : flags.contexts) {
    for (const std::int64_t batch : flags.batches) {
      StepBench bench(ctx, *model, cache_spec, batch, context);
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
                 {"roof_bytes_per_s", roof},
                 {"times_roof", ratio},
                 {"launches", step.num_ops}});
    }
  }
  return kExitOk;
}

Expected<ExitCode> run_kernels(const BenchFlags& flags, const GlobalOptions& global) {
  Runtime runtime(global, global.threads);
  const ExecCtx& ctx = runtime.ctx();
  const auto loaded = load_with_caches(ctx, flags);
  if (!loaded) {
    return loaded.failure();
  }
  const auto& [model, cache_spec] = *loaded;
  const Roofs roofs = measure_roofs(ctx);
  constexpr int kRounds = 11;
  for (const std::int64_t context : flags.contexts) {
    for (const std::int64_t batch : flags.batches) {
      const std::int64_t rows = flags.new_tokens;
      StepBench bench(ctx, *model, cache_spec, batch, context, rows);
      const PassProfile profile = bench.profile(roofs, kRounds);
      nlohmann::ordered_json json = {{"device", ctx.device->name()},
                                     {"batch", batch},
                                     {"context", context},
                                     {"new_tokens", rows},
                                     {"roof_bytes_per_s", roofs.bytes_per_s},
                                     {"roof_flops_per_s", roofs.flops_per_s}};
      json.update(to_json(profile));
      print_row(
          flags,
          fmt::format("{} sequence{} of {} cached tokens, {} new each, on {}\nroofs: {}\n\n{}\n",
                      batch, batch == 1 ? "" : "s", context, rows, ctx.device->name(),
                      describe(roofs, *ctx.device), to_table(profile)),
          json);
    }
  }
  return kExitOk;
}

Expected<ExitCode> check_pieces_of(const BenchFlags& flags, const ExecCtx& ctx, const Model& model,
                                   const CacheSpec& spec, std::int64_t tokens) {
  const PieceCheck check = check_pieces(ctx, model, spec, tokens, flags.check_pieces);
  const auto rate = [&](double seconds) { return static_cast<double>(check.tokens) / seconds; };
  std::string text =
      check.cut_reason.empty() ? std::string{} : fmt::format("{}\n", check.cut_reason);
  text += fmt::format(
      "prompt {:>7} at once {:>10.1f} tok/s, in pieces of {} {:>10.1f} tok/s; logits, states and "
      "latent rows: {}\n",
      check.tokens, rate(check.whole_s), flags.check_pieces, rate(check.pieces_s),
      check.difference ? "DIFFERENT, " + *check.difference : "equal bit for bit");
  print_row(flags, text,
            {{"prompt", check.tokens},
             {"asked", tokens},
             {"cut_reason", check.cut_reason},
             {"piece", flags.check_pieces},
             {"tokens_per_s_at_once", rate(check.whole_s)},
             {"tokens_per_s_in_pieces", rate(check.pieces_s)},
             {"equal", !check.difference.has_value()},
             {"difference", check.difference.value_or("")}});
  if (check.difference) {
    return fail("prompt of {} tokens in pieces of {}: {} differs from the prompt at once",
                check.tokens, flags.check_pieces, *check.difference);
  }
  return kExitOk;
}

Expected<ExitCode> run_prefill(const BenchFlags& flags, const GlobalOptions& global) {
  Runtime runtime(global, global.threads);
  const ExecCtx& ctx = runtime.ctx();
  const auto loaded = load_with_caches(ctx, flags);
  if (!loaded) {
    return loaded.failure();
  }
  const auto& [model, cache_spec] = *loaded;
  for (const std::int64_t tokens : flags.prefills) {
    if (flags.check_pieces > 0) {
      if (auto code = check_pieces_of(flags, ctx, *model, cache_spec, tokens); !code) {
        return code;
      }
      continue;
    }
    const std::int64_t piece = flags.pieces == 0 ? tokens : std::min(flags.pieces, tokens);
    PrefillBench bench(ctx, *model, cache_spec, tokens, piece);
    static_cast<void>(bench.run());
    std::vector<double> seconds;
    for (std::int64_t round = 0; round < flags.rounds; ++round) {
      seconds.push_back(bench.run());
    }
    const double rate = static_cast<double>(tokens) / median(seconds);
    print_row(flags,
              fmt::format("prompt {:>7} in pieces of {:>7} {:>12.1f} tok/s\n", tokens, piece, rate),
              {{"prompt", tokens}, {"piece", piece}, {"tokens_per_s", rate}});
  }
  return kExitOk;
}

std::string describe(const DecodeFigures& decode) {
  const auto a_step = [&](std::int64_t count) {
    return static_cast<double>(count) / static_cast<double>(decode.steps);
  };
  const DeviceCounters& counters = decode.counters;
  std::string text;
  if (decode.device_us) {
    text +=
        fmt::format("  a step: host {:.1f} us; traced, the device {:.1f} us; the host called {}\n",
                    decode.host_us, *decode.device_us, count_names(decode.host_calls));
  }
  if (!decode.trace_problem.empty()) {
    text += fmt::format("  no trace: {}\n", decode.trace_problem);
  }
  if (counters.uploads + counters.launches + counters.recorded_launches > 0) {
    text += fmt::format(
        "  a step: {:.2f} uploads, {:.2f} downloads, {:.2f} waits, {:.2f} graph launches, {:.2f} "
        "other launches, {:.2f} allocations\n",
        a_step(counters.uploads), a_step(counters.downloads), a_step(counters.waits),
        a_step(counters.recorded_launches), a_step(counters.launches),
        a_step(counters.allocations));
  }
  if (decode.memory) {
    constexpr double kGib = 1 << 30;
    text += fmt::format(
        "  memory: {:.3f} GiB planned, {:.3f} GiB allocated after the steps, {:.3f} GiB free\n",
        static_cast<double>(decode.plan.total_bytes()) / kGib,
        static_cast<double>(decode.memory->allocated) / kGib,
        static_cast<double>(decode.memory->free) / kGib);
  }
  return text;
}

nlohmann::ordered_json json_of(const DecodeFigures& decode) {
  nlohmann::ordered_json json = {{"tokens_per_s", decode.tokens_per_s},
                                 {"step_us", decode.step_us},
                                 {"steps", decode.steps},
                                 {"uploads", decode.counters.uploads},
                                 {"downloads", decode.counters.downloads},
                                 {"waits", decode.counters.waits},
                                 {"graph_launches", decode.counters.recorded_launches},
                                 {"other_launches", decode.counters.launches},
                                 {"allocations", decode.counters.allocations}};
  if (decode.memory) {
    json["planned_bytes"] = decode.plan.total_bytes();
    json["allocated_bytes"] = decode.memory->allocated;
    json["free_bytes"] = decode.memory->free;
  }
  if (decode.device_us) {
    json["device_us"] = *decode.device_us;
    json["host_us"] = decode.host_us;
    json["host_calls"] = decode.host_calls;
  }
  return json;
}

Expected<ExitCode> run_engine(const BenchFlags& flags, const GlobalOptions& global) {
  Runtime runtime(global, global.threads);
  const ExecCtx& ctx = runtime.ctx();
  auto model = load(ctx, flags);
  if (!model) {
    return model.failure();
  }
  for (const std::int64_t tokens : flags.prefills) {
    const double rate = prefill_rate(ctx, **model, flags.kv_cache_dtype, tokens, flags.rounds);
    print_row(flags, fmt::format("prefill {:>6} tokens {:>12.1f} tok/s\n", tokens, rate),
              {{"prefill", tokens}, {"tokens_per_s", rate}});
  }
  const auto work = [&flags](std::int64_t batch) {
    return DecodeWork{batch, flags.prompt, flags.tokens, flags.kv_cache_dtype};
  };
  std::vector<DecodeFigures> figures;
  for (const std::int64_t batch : flags.batches) {
    figures.push_back(decode_figures(ctx, **model, work(batch)));
  }
  for (std::size_t i = 0; i < figures.size(); ++i) {
    const std::int64_t batch = flags.batches[i];
    DecodeFigures& decode = figures[i];
    add_traces(decode, ctx, **model, work(batch));
    nlohmann::ordered_json json = {{"decode_batch", batch}};
    json.update(json_of(decode));
    print_row(flags,
              fmt::format("decode batch {:>4}   {:>12.1f} tok/s {:>10.1f} us a step\n{}", batch,
                          decode.tokens_per_s, decode.step_us, describe(decode)),
              json);
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
  add_kv_cache_dtype(app, flags.kv_cache_dtype);
  app.add_flag("--json", flags.json, "One JSON object a row");
}

void add_list(CLI::App& app, const char* name, std::vector<std::int64_t>& values, const char* text,
              int least, int most = 1 << 24) {
  app.add_option(name, values, text)
      ->delimiter(',')
      ->check(CLI::Range(least, most))
      ->capture_default_str();
}

void add_count(CLI::App& app, const char* name, std::int64_t& value, const char* text) {
  app.add_option(name, value, text)->check(CLI::Range(1, 1 << 24))->capture_default_str();
}

void add_rounds(CLI::App& app, BenchFlags& flags) {
  add_count(app, "--rounds", flags.rounds,
            "Prompts timed, after one that is not; the median counts");
}

void add_decode_flags(CLI::App& app, BenchFlags& flags) {
  add_list(app, "--batch", flags.batches, "Sequences of the step", 1, 4096);
  add_list(app, "--context", flags.contexts, "Cached tokens a sequence", 1);
}

/// Of --check-pieces: empty when `text` is a multiple of 64.
std::string check_aligned(const std::string& text) {
  const bool aligned = text.find_first_not_of("0123456789") == std::string::npos &&
                       text.size() < 10 && std::stoll(text) > 0 && std::stoll(text) % 64 == 0;
  return aligned ? std::string{} : "'" + text + "': expected a multiple of 64";
}

void add_prefill_flags(CLI::App& app, BenchFlags& flags) {
  add_list(app, "--prefill", flags.prefills, "Prompt lengths", 1);
  CLI::Option* pieces =
      app.add_option("--pieces", flags.pieces, "Tokens of a pass; 0 is the whole prompt")
          ->check(CLI::NonNegativeNumber)
          ->capture_default_str();
  app.add_option("--check-pieces", flags.check_pieces,
                 "Also prefill in pieces of so many tokens, a multiple of 64, and compare logits, "
                 "states and latent rows bit for bit; a prompt that does not fit into the device's "
                 "memory at once is cut")
      ->check(CLI::Validator(check_aligned, ""))
      ->excludes(pieces);
  add_rounds(app, flags);
}

void add_kernels_flags(CLI::App& app, BenchFlags& flags) {
  app.footer(
      "Times on a GPU come from CUPTI, a part of the CUDA toolkit, and run from the end of the\n"
      "kernel before to a kernel's own end. On the CPU they are those of the ops.");
  add_list(app, "--batch", flags.batches, "Sequences of the pass", 1, 4096);
  add_list(app, "--context", flags.contexts, "Cached tokens a sequence", 0);
  add_count(app, "--prefill", flags.new_tokens,
            "New tokens a sequence; more than 1 is a pass over prompts, not a decode step");
}

void add_engine_flags(CLI::App& app, BenchFlags& flags) {
  add_list(app, "--batch", flags.batches, "Sequences that decode beside each other", 1, 4096);
  add_list(app, "--prefill", flags.prefills, "Prompt lengths", 1);
  add_count(app, "--prompt", flags.prompt, "Prompt before decoding");
  add_count(app, "--tokens", flags.tokens, "Decoded tokens a sequence");
  add_rounds(app, flags);
}

}  // namespace

void add_bench(CommandLine& line) {
  CLI::App* bench = line.add("bench", "Measure a model on a device, or a server under load");
  bench->require_subcommand(1);
  const auto flags = std::make_shared<BenchFlags>();
  const auto add = [&](const char* name, const char* text, auto run, auto add_flags) {
    CLI::App* command = bench->add_subcommand(name, text);
    add_global_options(*command, line.global);
    add_model_flags(*command, *flags);
    add_flags(*command, *flags);
    command->callback([&line, flags, run] {
      line.action = [&line, flags, run] { return run(*flags, line.global); };
    });
  };
  add("decode", "One decode step at given batches and contexts, against the bytes it must move",
      run_decode, add_decode_flags);
  add("prefill", "Prompts through the model, at once or in pieces", run_prefill, add_prefill_flags);
  add("kernels",
      "A pass op by op and kernel by kernel, each against the roof of its bytes and FLOPs",
      run_kernels, add_kernels_flags);
  add("engine", "Prompts and decode steps through the engine", run_engine, add_engine_flags);
  add_serve_bench(line, *bench);
}

}  // namespace tandem::cli
