#include "cli/pass_profile.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "core/checked_cast.h"
#include "core/timing.h"

namespace tandem::cli {
namespace {

using EventKind = TraceEvent::Kind;

std::string part_of(std::string_view op) {
  const auto starts = [op](std::string_view prefix) { return op.starts_with(prefix); };
  if (starts("linear")) {
    return "linear";
  }
  if (starts("experts")) {
    return "experts";
  }
  if (starts("route")) {
    return "router";
  }
  if (starts("mla")) {
    return "attention";
  }
  if (starts("kda") || op == "conv1d" || op == "l2_norm" || op == "rms_norm_gated") {
    return "KDA";
  }
  if (starts("attn_res")) {
    return "AttnRes";
  }
  if (starts("rms_norm")) {
    return "norms";
  }
  if (op == "sample" || op == "log_prob") {
    return "sampling";
  }
  if (op == "embed") {
    return "embedding";
  }
  return "elementwise";
}

/// The last product of a pass and the picking of rows before it are its head.
void name_head(std::vector<CallFigures>& calls) {
  const auto last_of = [&](std::string_view op) {
    return std::ranges::find_if(calls.rbegin(), calls.rend(),
                                [op](const CallFigures& call) { return call.op == op; });
  };
  const auto head = last_of("linear");
  if (head == calls.rend()) {
    return;
  }
  head->part = "head";
  if (const auto before = std::next(head); before != calls.rend() && before->op == "embed") {
    before->part = "head";
  }
}

/// In the order in which it was given to the device, which is that of the ends.
std::vector<TraceEvent> device_work(const std::vector<TraceEvent>& trace) {
  std::vector<TraceEvent> work;
  std::ranges::copy_if(trace, std::back_inserter(work),
                       [](const TraceEvent& event) { return event.kind != EventKind::kCall; });
  std::ranges::stable_sort(work, {}, &TraceEvent::end_ns);
  return work;
}

double to_us(std::int64_t ns) {
  return 1e-3 * static_cast<double>(ns);
}

/// The times of one trace, kernel by kernel.
struct Times {
  std::vector<double> us;
  std::vector<double> resident_us;
  double total_us = 0;
};

Times times_of(const std::vector<TraceEvent>& work) {
  Times times;
  const std::int64_t begin = work.empty() ? 0 : work.front().start_ns;
  std::int64_t end = begin;
  for (const TraceEvent& event : work) {
    times.us.push_back(to_us(std::max<std::int64_t>(event.end_ns - end, 0)));
    times.resident_us.push_back(to_us(event.end_ns - event.start_ns));
    end = std::max(end, event.end_ns);
  }
  times.total_us = to_us(end - begin);
  return times;
}

void add_kernels(PassProfile& profile, std::span<const std::vector<TraceEvent>> traces) {
  std::vector<Times> rounds;
  std::vector<TraceEvent> first;
  for (const std::vector<TraceEvent>& trace : traces) {
    const std::vector<TraceEvent> work = device_work(trace);
    if (rounds.empty()) {
      first = work;
    }
    if (work.size() != first.size()) {
      profile.problem = fmt::format("traces of equal passes have {} and {} kernels and copies",
                                    first.size(), work.size());
      return;
    }
    rounds.push_back(times_of(work));
  }
  const auto median_of = [&](auto&& pick) {
    std::vector<double> values;
    std::ranges::transform(rounds, std::back_inserter(values), pick);
    return median(std::move(values));
  };
  for (std::size_t i = 0; i < first.size(); ++i) {
    profile.kernels.push_back(
        {first[i].name, 0, median_of([i](const Times& times) { return times.us[i]; }),
         median_of([i](const Times& times) { return times.resident_us[i]; })});
  }
  profile.us = median_of([](const Times& times) { return times.total_us; });
}

/// Kernel i belongs to the call that made the i-th launch.
void attribute(PassProfile& profile) {
  const std::int64_t launches = std::accumulate(
      profile.calls.begin(), profile.calls.end(), std::int64_t{0},
      [](std::int64_t sum, const CallFigures& call) { return sum + call.launches; });
  if (launches != isize(profile.kernels)) {
    profile.problem =
        fmt::format("the ops made {} launches and the trace has {} kernels and copies", launches,
                    profile.kernels.size());
    return;
  }
  std::size_t next = 0;
  for (std::size_t c = 0; c < profile.calls.size(); ++c) {
    CallFigures& call = profile.calls[c];
    call.us = 0;
    for (std::int64_t i = 0; i < call.launches; ++i, ++next) {
      profile.kernels[next].call = c;
      call.us += profile.kernels[next].us;
    }
  }
}

CallFigures figures_of(const Profiler::Call& call, const PassData& data, std::int64_t experts,
                       const Roofs& roofs) {
  const OpWork& work = call.work;
  CallFigures figures;
  figures.part = part_of(call.op);
  figures.op = call.op;
  figures.shape = work.shape;
  figures.launches = call.launches;
  figures.us = 1e6 * call.seconds;  // of the host, unless its kernels are found
  figures.bytes = work.bytes + work.bytes_per_expert * static_cast<double>(experts) +
                  work.bytes_per_key * static_cast<double>(data.keys);
  figures.flops = work.flops + work.flops_per_pair * static_cast<double>(data.pairs);
  figures.roof_us = 1e6 * roofs.seconds(figures.bytes, figures.flops);
  return figures;
}

}  // namespace

PassProfile make_profile(std::span<const Profiler::Call> calls, const PassData& data,
                         const Roofs& roofs, std::span<const std::vector<TraceEvent>> traces) {
  PassProfile profile;
  add_kernels(profile, traces);
  std::size_t layer = 0;
  for (const Profiler::Call& call : calls) {
    if (call.launches == 0 && !profile.kernels.empty()) {
      continue;  // it left its work to other ops
    }
    const bool has_experts = call.work.bytes_per_expert > 0 && layer < data.experts.size();
    profile.calls.push_back(figures_of(call, data, has_experts ? data.experts[layer++] : 0, roofs));
  }
  name_head(profile.calls);
  if (profile.kernels.empty()) {
    for (const CallFigures& call : profile.calls) {
      profile.us += call.us;
    }
  } else if (profile.problem.empty()) {
    attribute(profile);
  }
  for (const TraceEvent& event : traces.empty() ? std::vector<TraceEvent>{} : traces.front()) {
    if (event.kind == EventKind::kCall) {
      profile.host_calls.push_back(event.name);
    }
  }
  return profile;
}

std::string count_names(std::span<const std::string> names) {
  std::vector<std::pair<std::string, int>> counts;
  for (const std::string& name : names) {
    const auto found = std::ranges::find(counts, name, &std::pair<std::string, int>::first);
    if (found == counts.end()) {
      counts.emplace_back(name, 1);
    } else {
      ++found->second;
    }
  }
  std::string text;
  for (const auto& [name, count] : counts) {
    text += text.empty() ? "" : ", ";
    text += count > 1 ? fmt::format("{} x {}", count, name) : name;
  }
  return text;
}

}  // namespace tandem::cli
