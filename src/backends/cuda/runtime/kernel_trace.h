// kernel_trace.h — when each kernel ran, also inside graphs, and what the host called, by CUPTI.
// The library is loaded when the first trace is asked for; nothing links it.
#pragma once

#include <functional>
#include <vector>

#include "core/device.h"

namespace tandem::cuda {

/// What CUPTI saw of `ops`, by start: the host's calls until it returned, and what the device did
/// until `wait` returned, which waits for it. Graphs should be recorded after a first trace, so
/// that CUPTI knows their kernels. Errors: throws Error that says where CUPTI was looked for, or
/// what it reported.
[[nodiscard]] std::vector<TraceEvent> trace_activity(const std::function<void()>& ops,
                                                     const std::function<void()>& wait);

/// A kernel's demangled signature without namespaces of ours, return type and parameters.
[[nodiscard]] std::string short_kernel_name(const char* symbol);

}  // namespace tandem::cuda
