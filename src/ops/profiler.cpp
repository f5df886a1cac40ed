#include "ops/profiler.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

namespace tandem {

std::string Profiler::table() const {
  std::vector<std::pair<std::string, Entry>> rows(entries_.begin(), entries_.end());
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  double total = 0;
  for (const auto& [op, entry] : rows) {
    total += entry.seconds;
  }
  std::string out = fmt::format("{:<28} {:>10} {:>7} {:>10}\n", "op", "seconds", "share", "calls");
  for (const auto& [op, entry] : rows) {
    out += fmt::format("{:<28} {:>10.3f} {:>6.1f}% {:>10}\n", op, entry.seconds,
                       100 * entry.seconds / total, entry.calls);
  }
  return out;
}

}  // namespace tandem
