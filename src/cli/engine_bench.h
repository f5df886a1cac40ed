// engine_bench.h — the engine end to end: prompts to their first token, and decode steps with what
// the host does in each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/device.h"
#include "engine/options.h"
#include "models/model.h"
#include "ops/exec_ctx.h"

namespace tandem::cli {

/// Prompt tokens per second from submission to the first token: median of `rounds` after a first.
[[nodiscard]] double prefill_rate(const ExecCtx& ctx, const Model& model,
                                  std::optional<LatentFormat> kv_cache_dtype, std::int64_t tokens,
                                  std::int64_t rounds);

struct DecodeWork {
  std::int64_t batch = 1;
  std::int64_t prompt = 128;  // tokens before decoding
  std::int64_t tokens = 64;   // decoded, a sequence
  std::optional<LatentFormat> kv_cache_dtype = {};
};

/// Of the steps in which all sequences decode.
struct DecodeFigures {
  double tokens_per_s = 0;
  double step_us = 0;               // median, from the call to its return
  double host_us = 0;               // median of a step without the host's waits for the device
  std::int64_t steps = 0;           // measured
  DeviceCounters counters;          // of all of them together
  std::optional<double> device_us;  // median of the device's part of a traced step, first kernel
                                    // or copy to last; nullopt where nothing is traced
  std::vector<std::string> host_calls;  // of one traced step, to the device's library
  MemoryPlan plan;
  std::optional<DeviceMemory> memory;  // after the steps
  std::string trace_problem;           // why there is no trace; empty when there is, or none exists
};
/// All but what traces tell.
[[nodiscard]] DecodeFigures decode_figures(const ExecCtx& ctx, const Model& model,
                                           const DecodeWork& work);
/// Fills that in. To be called when all else is measured: what watches the device's library stays
/// there, and the host's calls are slower from then on.
void add_traces(DecodeFigures& figures, const ExecCtx& ctx, const Model& model,
                const DecodeWork& work);

}  // namespace tandem::cli
