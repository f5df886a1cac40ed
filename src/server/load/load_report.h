// load_report.h — a measured load for people and programs: a table, JSON, and one page for the
// browser with no link to anything outside itself.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/load/load_metrics.h"

namespace tandem::load {

struct LoadReport {
  /// What was asked of whom: name and value, in the order to be shown.
  std::vector<std::pair<std::string, std::string>> setting;
  Slo slo;
  bool has_exact_itl = false;  // gaps are per token, not per chunk
  std::vector<RequestRecord> records;
  LoadSummary summary;  // of `records`
};

/// Lines for a terminal; times in milliseconds.
[[nodiscard]] std::string to_table(const LoadReport& report);

/// One object: names of figures as in vLLM's bench (times in ms), "setting", "errors", and
/// "requests" with one object a request.
[[nodiscard]] std::string to_json(const LoadReport& report);

/// The page: figures, distributions and the course of the run.
[[nodiscard]] std::string to_page(const LoadReport& report);

/// "ttft <= 200 ms, ..."; empty without limits.
[[nodiscard]] std::string describe(const Slo& slo);

}  // namespace tandem::load
