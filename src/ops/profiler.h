// profiler.h — wall time and work per op name, for the profile tables of docs/perf, `--profile` and
// `tandem bench kernels`.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/device.h"

namespace tandem {

/// The least a call must move and compute: every input read once, every output written once.
/// Products and sums count one each. What depends on data that the host may not see is left as a
/// price a piece.
struct OpWork {
  std::string shape;  // "16 x 7168 -> 3072": calls of one shape are one line of a table
  double bytes = 0;
  double flops = 0;
  double bytes_per_expert = 0;  // experts(): for each distinct expert chosen
  double bytes_per_key = 0;     // mla_absorbed(): for each cached row of a sequence
  double flops_per_pair = 0;    // mla_absorbed(): for each query row and key it sees
};

class Profiler {
 public:
  struct Entry {
    double seconds = 0;
    std::int64_t calls = 0;
  };
  struct Call {
    std::string op;
    OpWork work;
    std::int64_t launches = 0;  // kernels, copies and fills it gave to the device, in order
    double seconds = 0;         // of the host
  };

  Profiler() = default;
  /// Keeps every call, with the launches that `device` counted.
  explicit Profiler(const Device& device) : device_(&device) {}

  void add(std::string_view op, double seconds) {
    Entry& entry = entries_[std::string(op)];
    entry.seconds += seconds;
    ++entry.calls;
  }
  void add(Call call) { calls_.push_back(std::move(call)); }
  void clear() {
    entries_.clear();
    calls_.clear();
  }
  [[nodiscard]] const std::map<std::string, Entry, std::less<>>& entries() const {
    return entries_;
  }
  [[nodiscard]] bool keeps_calls() const { return device_ != nullptr; }
  [[nodiscard]] const std::vector<Call>& calls() const { return calls_; }
  [[nodiscard]] std::int64_t launches() const {
    return device_ != nullptr ? device_->counters().launches : 0;
  }
  /// A table, largest share first: op, seconds, share, calls.
  [[nodiscard]] std::string table() const;

 private:
  const Device* device_ = nullptr;
  std::map<std::string, Entry, std::less<>> entries_;
  std::vector<Call> calls_;
};

/// Adds the life of the scope to `profiler` under `op`; does nothing when profiler is null.
class ProfileScope {
 public:
  ProfileScope(Profiler* profiler, std::string_view op) : profiler_(profiler), op_(op) {
    if (profiler_ != nullptr) {
      launches_ = profiler_->launches();
      start_ = std::chrono::steady_clock::now();
    }
  }
  /// `work` gives the call's OpWork; it is asked only when the profiler keeps calls.
  template <typename Work>
  ProfileScope(Profiler* profiler, std::string_view op, const Work& work)
      : ProfileScope(profiler, op) {
    if (profiler_ != nullptr && profiler_->keeps_calls()) {
      work_ = work();
      start_ = std::chrono::steady_clock::now();
    }
  }
  ~ProfileScope() {
    if (profiler_ == nullptr) {
      return;
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    profiler_->add(op_, seconds);
    if (profiler_->keeps_calls()) {
      profiler_->add(
          {std::string(op_), std::move(work_), profiler_->launches() - launches_, seconds});
    }
  }
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;

 private:
  Profiler* profiler_;
  std::string_view op_;
  OpWork work_;
  std::int64_t launches_ = 0;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace tandem
