// pass_profile.h — a traced pass of a model, op by op and kernel by kernel, against the least time
// that its bytes and operations take. Pure: what was measured comes in, tables go out.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/roofs.h"
#include "core/device.h"
#include "ops/profiler.h"

namespace tandem::cli {

/// The part of a pass's work that its batch and its router decide.
struct PassData {
  std::vector<std::int64_t> experts;  // distinct experts chosen, an experts() call each
  std::int64_t keys = 0;              // cached rows of all sequences
  std::int64_t pairs = 0;             // query rows, each times the keys it sees
};

/// A kernel, copy or fill. Those of a pass run one after the other, though a kernel may be resident
/// early: its time is that from the end of the one before to its own end, so that times add up.
struct KernelFigures {
  std::string name;
  std::size_t call = 0;  // index of the call that launched it
  double us = 0;
  double resident_us = 0;  // from its own start to its own end
};

struct CallFigures {
  std::string part;   // of a layer or of the step
  std::string op;     // as the op table has it
  std::string shape;  // of its inputs
  std::int64_t launches = 0;
  double us = 0;
  double bytes = 0;
  double flops = 0;
  double roof_us = 0;
};

struct PassProfile {
  std::vector<CallFigures> calls;       // in order
  std::vector<KernelFigures> kernels;   // in order; none where the device does not tell
  std::vector<std::string> host_calls;  // that the host made to the device's library, in order
  double us = 0;                        // from the first kernel's start to the last one's end
  double untraced_us = 0;               // the same pass, timed from the host
  std::string problem;                  // why calls have no times; empty when they have
};

/// Splits the traces of equal passes (median of each kernel) among the calls that launched them, in
/// order. Without kernels in the traces, calls keep the host's seconds.
[[nodiscard]] PassProfile make_profile(std::span<const Profiler::Call> calls, const PassData& data,
                                       const Roofs& roofs,
                                       std::span<const std::vector<TraceEvent>> traces);

/// Three tables: parts and their ops, kernels by name, and a bar of the pass against its roofs.
[[nodiscard]] std::string to_table(const PassProfile& profile);
[[nodiscard]] nlohmann::ordered_json to_json(const PassProfile& profile);

/// "cudaGraphLaunch, 2 x cudaMemcpyAsync": in order of first appearance.
[[nodiscard]] std::string count_names(std::span<const std::string> names);

}  // namespace tandem::cli
