// budget.h — what a compilation may use. A grammar comes from outside, so its size and time are
// limits of a request, not assertions.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "core/error.h"
#include "text/grammar.h"

namespace tandem::grammar {

/// Sticky: once something ran out, every later request fails too, so that builders can go on
/// cheaply and one check at the end is enough.
class Budget {
 public:
  explicit Budget(const GrammarLimits& limits);

  [[nodiscard]] const GrammarLimits& limits() const { return limits_; }
  /// One more state. Errors: false when there are too many, or time ran out.
  [[nodiscard]] bool take_state();
  /// Steps of work that memory or time grows with. Errors: as take_state().
  [[nodiscard]] bool take_work(std::int64_t steps);
  [[nodiscard]] bool exhausted() const { return !reason_.empty(); }
  /// What ran out. Only when exhausted().
  [[nodiscard]] Failure failure() const { return Failure{reason_}; }

 private:
  using Clock = std::chrono::steady_clock;

  GrammarLimits limits_;
  Clock::time_point deadline_;
  std::int64_t states_ = 0;
  std::int64_t work_ = 0;
  std::int64_t next_clock_check_ = 0;  // in units of work_
  std::string reason_;
};

}  // namespace tandem::grammar
