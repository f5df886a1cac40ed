// profiler.h — wall time and work per op name, for the profile tables of docs/perf and `--profile`.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace tandem {

class Profiler {
 public:
  struct Entry {
    double seconds = 0;
    std::int64_t calls = 0;
  };

  void add(std::string_view op, double seconds) {
    Entry& entry = entries_[std::string(op)];
    entry.seconds += seconds;
    ++entry.calls;
  }
  void clear() { entries_.clear(); }
  [[nodiscard]] const std::map<std::string, Entry, std::less<>>& entries() const {
    return entries_;
  }
  /// A table, largest share first: op, seconds, share, calls.
  [[nodiscard]] std::string table() const;

 private:
  std::map<std::string, Entry, std::less<>> entries_;
};

/// Adds the life of the scope to `profiler` under `op`; does nothing when profiler is null.
class ProfileScope {
 public:
  ProfileScope(Profiler* profiler, std::string_view op) : profiler_(profiler), op_(op) {
    if (profiler_ != nullptr) {
      start_ = std::chrono::steady_clock::now();
    }
  }
  ~ProfileScope() {
    if (profiler_ != nullptr) {
      profiler_->add(
          op_, std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count());
    }
  }
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;

 private:
  Profiler* profiler_;
  std::string_view op_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace tandem
