// load_run.h — sends a workload to a server and records what comes back.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "server/load/endpoint.h"
#include "server/load/load_metrics.h"
#include "server/load/target.h"
#include "server/load/workload.h"

namespace tandem::load {

struct RunOptions {
  Target target;
  RequestForm form;
  std::string api_key;
  std::int64_t max_concurrency = 0;    // conversations under way at once; 0: no limit
  std::optional<double> request_rate;  // conversations begun a second, Poisson; else all at once
  bool uses_arrivals = false;          // each conversation at its own time instead
  std::int64_t vocab_size = 10000;     // for made-up replies
  std::uint64_t seed = 42;             // of the arrivals
  double timeout_s = 600;              // without a byte
};

struct RunProgress {
  std::int64_t finished = 0;
  std::int64_t failed = 0;
  std::int64_t running = 0;
};

/// Seconds from the start at which conversations begin; the first at once.
[[nodiscard]] std::vector<double> arrival_times(const RunOptions& options,
                                                const Workload& workload);

/// One record a request, in the order of the workload. Returns early when `stop` is set: what was
/// under way then is recorded as "cancelled", what was not sent as "not_sent". `on_progress` is
/// called about ten times a second, on the caller's thread.
/// Errors: a Failure when the target has no address; failing requests are records.
[[nodiscard]] Expected<std::vector<RequestRecord>> run_load(
    const RunOptions& options, const Workload& workload, const std::atomic<bool>& stop,
    const std::function<void(const RunProgress&)>& on_progress);

/// The first model that GET /v1/models lists. Errors: a Failure with what the server said.
[[nodiscard]] Expected<std::string> first_model(const RunOptions& options);

/// POST /flush_cache, waiting for the server to be idle. Errors: a Failure with what it said.
[[nodiscard]] Status flush_cache(const RunOptions& options);

}  // namespace tandem::load
