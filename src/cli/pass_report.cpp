// pass_report.cpp — the tables and the JSON of pass_profile.h.
#include <algorithm>
#include <functional>
#include <map>

#include <fmt/format.h>

#include "cli/pass_profile.h"
#include "core/checked_cast.h"

namespace tandem::cli {
namespace {

/// Calls, or kernels, that a table shows as one line.
struct Row {
  std::string name;
  std::int64_t calls = 0;
  std::int64_t launches = 0;
  double us = 0;
  double bytes = 0;
  double flops = 0;
  double roof_us = 0;

  void add(const CallFigures& call) {
    ++calls;
    launches += call.launches;
    us += call.us;
    bytes += call.bytes;
    flops += call.flops;
    roof_us += call.roof_us;
  }
};

/// Longest first.
std::vector<Row> rows_by(const std::vector<CallFigures>& calls,
                         const std::function<std::string(const CallFigures&)>& key) {
  std::map<std::string, Row> rows;
  for (const CallFigures& call : calls) {
    Row& row = rows[key(call)];
    row.name = key(call);
    row.add(call);
  }
  std::vector<Row> sorted;
  for (auto& [name, row] : rows) {
    sorted.push_back(std::move(row));
  }
  std::ranges::stable_sort(sorted, std::greater{}, &Row::us);
  return sorted;
}

std::vector<Row> parts_of(const PassProfile& profile) {
  return rows_by(profile.calls, [](const CallFigures& call) { return call.part; });
}

std::vector<Row> ops_of(const PassProfile& profile, const std::string& part) {
  std::vector<CallFigures> calls;
  std::ranges::copy_if(profile.calls, std::back_inserter(calls),
                       [&](const CallFigures& call) { return call.part == part; });
  return rows_by(calls,
                 [](const CallFigures& call) { return fmt::format("{} {}", call.op, call.shape); });
}

std::vector<Row> kernels_of(const PassProfile& profile) {
  std::vector<CallFigures> launches;
  for (const KernelFigures& kernel : profile.kernels) {
    CallFigures one;
    one.op = kernel.name;
    one.shape = profile.problem.empty() ? profile.calls[kernel.call].op : std::string{};
    one.launches = 1;
    one.us = kernel.us;
    launches.push_back(std::move(one));
  }
  return rows_by(launches, [](const CallFigures& call) {
    return call.shape.empty() ? call.op : fmt::format("{}: {}", call.shape, call.op);
  });
}

double share(double part, double whole) {
  return whole > 0 ? 100 * part / whole : 0;
}

std::string cut(std::string text, std::size_t width) {
  if (text.size() > width) {
    text.resize(width - 3);
    text += "...";
  }
  return text;
}

constexpr std::size_t kNameWidth = 58;

std::string line(const Row& row, const char* indent, double total_us) {
  return fmt::format(
      "{:<{}} {:>5} {:>8} {:>10.1f} {:>6.1f} {:>11.2f} {:>11.2f} {:>9.1f} {:>6.1f}\n",
      cut(indent + row.name, kNameWidth), kNameWidth, row.calls, row.launches, row.us,
      share(row.us, total_us), 1e-6 * row.bytes, 1e-9 * row.flops, row.roof_us,
      share(row.roof_us, row.us));
}

Row sum_of(const std::vector<Row>& rows, std::string name) {
  Row sum;
  sum.name = std::move(name);
  for (const Row& row : rows) {
    sum.calls += row.calls;
    sum.launches += row.launches;
    sum.us += row.us;
    sum.bytes += row.bytes;
    sum.flops += row.flops;
    sum.roof_us += row.roof_us;
  }
  return sum;
}

std::string op_table(const PassProfile& profile, const std::vector<Row>& parts) {
  std::string text = fmt::format("{:<{}} {:>5} {:>8} {:>10} {:>6} {:>11} {:>11} {:>9} {:>6}\n",
                                 "part, op and shape", kNameWidth, "calls", "launches", "us",
                                 "% time", "MB", "GFLOP", "roof us", "% roof");
  for (const Row& part : parts) {
    text += line(part, "", profile.us);
    for (const Row& op : ops_of(profile, part.name)) {
      text += line(op, "  ", profile.us);
    }
  }
  return text + line(sum_of(parts, "all"), "", profile.us);
}

std::string kernel_table(const PassProfile& profile) {
  constexpr std::size_t kWidth = 100;
  std::string text = fmt::format("\n{:<{}} {:>8} {:>10} {:>8} {:>6}\n", "op: kernel, or copy",
                                 kWidth, "launches", "us", "us each", "% time");
  for (const Row& row : kernels_of(profile)) {
    text += fmt::format("{:<{}} {:>8} {:>10.1f} {:>8.2f} {:>6.1f}\n", cut(row.name, kWidth), kWidth,
                        row.launches, row.us, row.us / static_cast<double>(row.launches),
                        share(row.us, profile.us));
  }
  return text;
}

/// A bar a part: '#' for its roof, '.' for what it took beyond.
std::string breakdown(const PassProfile& profile, const std::vector<Row>& parts) {
  constexpr double kBar = 60;
  const Row sum = sum_of(parts, "all");
  const double scale = profile.us > 0 ? kBar / profile.us : 0;
  std::string text = "\n# roof   . beyond it\n";
  for (const Row& part : parts) {
    const double covered = std::min(part.roof_us, part.us);
    const auto hashes = static_cast<std::size_t>(scale * covered + 0.5);
    const auto all = std::max(static_cast<std::size_t>(scale * part.us + 0.5), hashes);
    text += fmt::format("{:<12} {:>10.1f} us  {}{}\n", part.name, part.us, std::string(hashes, '#'),
                        std::string(all - hashes, '.'));
  }
  text += fmt::format(
      "sum of roofs {:.1f} us = {:.1f} % of {:.1f} us (in ops {:.1f} us); untraced {:.1f} us\n",
      sum.roof_us, share(sum.roof_us, profile.us), profile.us, sum.us, profile.untraced_us);
  if (!profile.host_calls.empty()) {
    text += fmt::format("calls of the host to the device's library: {}\n",
                        count_names(profile.host_calls));
  }
  return text;
}

nlohmann::ordered_json json_of(const Row& row) {
  return {{"name", row.name},   {"calls", row.calls}, {"launches", row.launches}, {"us", row.us},
          {"bytes", row.bytes}, {"flops", row.flops}, {"roof_us", row.roof_us}};
}

}  // namespace

std::string to_table(const PassProfile& profile) {
  const std::vector<Row> parts = parts_of(profile);
  std::string text = op_table(profile, parts);
  if (!profile.kernels.empty()) {
    text += kernel_table(profile);
  }
  if (!profile.problem.empty()) {
    text += fmt::format("\nkernels could not be matched with ops: {}\n", profile.problem);
  }
  return text + breakdown(profile, parts);
}

nlohmann::ordered_json to_json(const PassProfile& profile) {
  nlohmann::ordered_json json;
  json["us"] = profile.us;
  json["untraced_us"] = profile.untraced_us;
  const std::vector<Row> parts = parts_of(profile);
  json["roof_us"] = sum_of(parts, "all").roof_us;
  json["launches"] = sum_of(parts, "all").launches;
  json["problem"] = profile.problem;
  json["host_calls"] = profile.host_calls;
  json["parts"] = nlohmann::ordered_json::array();
  for (const Row& part : parts) {
    nlohmann::ordered_json entry = json_of(part);
    for (const Row& op : ops_of(profile, part.name)) {
      entry["ops"].push_back(json_of(op));
    }
    json["parts"].push_back(std::move(entry));
  }
  json["calls"] = nlohmann::ordered_json::array();
  for (const CallFigures& call : profile.calls) {
    json["calls"].push_back({{"part", call.part},
                             {"op", call.op},
                             {"shape", call.shape},
                             {"launches", call.launches},
                             {"us", call.us},
                             {"bytes", call.bytes},
                             {"flops", call.flops},
                             {"roof_us", call.roof_us}});
  }
  json["kernels"] = nlohmann::ordered_json::array();
  for (const KernelFigures& kernel : profile.kernels) {
    json["kernels"].push_back({{"name", kernel.name},
                               {"call", kernel.call},
                               {"us", kernel.us},
                               {"resident_us", kernel.resident_us}});
  }
  return json;
}

}  // namespace tandem::cli
