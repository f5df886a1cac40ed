#include "cli/engine_bench.h"

#include <algorithm>
#include <utility>

#include "core/checked_cast.h"
#include "core/error.h"
#include "core/rng.h"
#include "core/timing.h"
#include "engine/engine.h"

namespace tandem::cli {
namespace {

constexpr int kTracedSteps = 8;

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

DeviceCounters operator-(const DeviceCounters& a, const DeviceCounters& b) {
  return {.allocations = a.allocations - b.allocations,
          .uploads = a.uploads - b.uploads,
          .downloads = a.downloads - b.downloads,
          .waits = a.waits - b.waits,
          .wait_seconds = a.wait_seconds - b.wait_seconds,
          .launches = a.launches - b.launches,
          .recorded_launches = a.recorded_launches - b.recorded_launches};
}

DeviceCounters operator+(const DeviceCounters& a, const DeviceCounters& b) {
  return a - (DeviceCounters{} - b);
}

EngineOptions options_for(std::int64_t batch, std::int64_t max_seq_len, std::int64_t rows,
                          std::optional<LatentFormat> kv_cache_dtype) {
  EngineOptions options;
  options.kv_cache_dtype = kv_cache_dtype;
  options.max_batch_tokens = std::max(batch, rows);
  options.max_running_seqs = batch;
  options.max_seq_len = max_seq_len;
  options.page_size = 64;
  options.prefix_cache = false;  // rounds repeat prompts
  // A page more for each, which the scheduler wants to see before it admits the next.
  options.num_pages = batch * ((max_seq_len + 63) / 64 + 1);
  return options;
}

/// One decode step of all sequences.
struct DecodeStep {
  double seconds = 0;
  DeviceCounters counters;
};

/// Runs one round of sequences; each step of the engine is run by `run_step`. Those in which all
/// sequences decode.
template <typename RunStep>
std::vector<DecodeStep> decode_round(Engine& engine, const ExecCtx& ctx, const Model& model,
                                     const DecodeWork& work, std::uint64_t round,
                                     const RunStep& run_step) {
  std::vector<RequestId> ids;
  for (std::int64_t b = 0; b < work.batch; ++b) {
    Request request = random_request(model, work.prompt, work.tokens + 1,
                                     round * 10'000 + static_cast<std::uint64_t>(b));
    ids.push_back(engine.submit(std::move(request)).value_or_throw());
  }
  std::vector<DecodeStep> steps;
  while (engine.has_work()) {
    const std::int64_t tokens = engine.stats().decode_tokens;
    const DeviceCounters counters = ctx.device->counters();
    const auto start = Clock::now();
    const bool counts = run_step();
    const double seconds = seconds_since(start);
    if (counts && engine.stats().decode_tokens - tokens == work.batch) {
      steps.push_back({seconds, ctx.device->counters() - counters});
    }
  }
  for (const RequestId id : ids) {
    static_cast<void>(engine.take_output(id));
  }
  return steps;
}

/// From the first kernel's start to the end of what the device did last.
std::optional<double> device_us(const std::vector<TraceEvent>& trace) {
  using Kind = TraceEvent::Kind;
  const auto first = std::ranges::find(trace, Kind::kKernel, &TraceEvent::kind);
  if (first == trace.end()) {
    return std::nullopt;
  }
  std::int64_t end = first->end_ns;
  for (const TraceEvent& event : trace) {
    end = event.kind == Kind::kCall ? end : std::max(end, event.end_ns);
  }
  return 1e-3 * static_cast<double>(end - first->start_ns);
}

/// Of a few steps in which all sequences decode.
std::vector<std::vector<TraceEvent>> trace_steps(Engine& engine, const ExecCtx& ctx,
                                                 const Model& model, const DecodeWork& work) {
  std::vector<std::vector<TraceEvent>> traces;
  std::vector<TraceEvent> trace;
  static_cast<void>(decode_round(engine, ctx, model, work, 3, [&] {
    const std::int64_t tokens = engine.stats().decode_tokens;
    if (isize(traces) == kTracedSteps) {
      engine.step();
      return false;
    }
    trace = ctx.device->trace([&] { engine.step(); });
    if (engine.stats().decode_tokens - tokens == work.batch) {
      traces.push_back(std::move(trace));
    }
    return true;
  }));
  return traces;
}

Engine decode_engine(const ExecCtx& ctx, const Model& model, const DecodeWork& work) {
  return {model, ctx,
          options_for(work.batch, work.prompt + work.tokens + 2, 512, work.kv_cache_dtype)};
}

}  // namespace

double prefill_rate(const ExecCtx& ctx, const Model& model,
                    std::optional<LatentFormat> kv_cache_dtype, std::int64_t tokens,
                    std::int64_t rounds) {
  Engine engine(model, ctx, options_for(1, tokens + 1, tokens, kv_cache_dtype));
  std::vector<double> seconds;
  for (std::int64_t round = 0; round <= rounds; ++round) {
    const RequestId id =
        engine.submit(random_request(model, tokens, 1, static_cast<std::uint64_t>(round)))
            .value_or_throw();
    const auto start = Clock::now();
    engine.run_until_idle();
    if (round > 0) {
      seconds.push_back(seconds_since(start));
    }
    static_cast<void>(engine.take_output(id));
  }
  return static_cast<double>(tokens) / median(std::move(seconds));
}

DecodeFigures decode_figures(const ExecCtx& ctx, const Model& model, const DecodeWork& work) {
  Engine engine = decode_engine(ctx, model, work);
  const auto plain = [&engine] {
    engine.step();
    return true;
  };
  static_cast<void>(decode_round(engine, ctx, model, work, 0, plain));  // steps are recorded
  DecodeFigures figures;
  figures.plan = engine.memory_plan();
  std::vector<double> seconds;
  std::vector<double> host_seconds;
  for (std::uint64_t round = 1; round <= 2; ++round) {
    for (const DecodeStep& step : decode_round(engine, ctx, model, work, round, plain)) {
      seconds.push_back(step.seconds);
      host_seconds.push_back(step.seconds - step.counters.wait_seconds);
      figures.counters = figures.counters + step.counters;
    }
  }
  TDM_CHECK(!seconds.empty(), work.batch, work.prompt, work.tokens);
  figures.memory = ctx.device->memory();
  figures.steps = isize(seconds);
  figures.step_us = 1e6 * median(std::move(seconds));
  figures.host_us = 1e6 * median(std::move(host_seconds));
  figures.tokens_per_s = 1e6 * static_cast<double>(work.batch) / figures.step_us;
  return figures;
}

void add_traces(DecodeFigures& figures, const ExecCtx& ctx, const Model& model,
                const DecodeWork& work) {
  Engine engine = decode_engine(ctx, model, work);
  std::vector<std::vector<TraceEvent>> traces;
  try {
    traces = trace_steps(engine, ctx, model, work);
  } catch (const Error& error) {
    figures.trace_problem = error.what();
    return;
  }
  std::vector<double> times;
  for (const std::vector<TraceEvent>& one : traces) {
    if (const auto us = device_us(one)) {
      times.push_back(*us);
    }
  }
  if (times.empty()) {
    return;
  }
  figures.device_us = median(times);
  for (const TraceEvent& event : traces.back()) {
    if (event.kind == TraceEvent::Kind::kCall) {
      figures.host_calls.push_back(event.name);
    }
  }
}

}  // namespace tandem::cli
