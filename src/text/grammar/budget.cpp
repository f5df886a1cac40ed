#include "text/grammar/budget.h"

namespace tandem::grammar {
namespace {

// Steps whose results stay in memory, four bytes each in the worst case.
constexpr std::int64_t kMaxWork = 50'000'000;
constexpr std::int64_t kWorkPerClockCheck = 10'000;

}  // namespace

Budget::Budget(const GrammarLimits& limits)
    : limits_(limits),
      deadline_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                   std::chrono::duration<double>(limits.max_compile_s))) {}

bool Budget::take_state() {
  if (!exhausted() && ++states_ > limits_.max_states) {
    reason_ = fmt::format("needs more than {} states", limits_.max_states);
  }
  return take_work(1);
}

bool Budget::take_work(std::int64_t steps) {
  if (exhausted()) {
    return false;
  }
  work_ += steps;
  if (work_ > kMaxWork) {
    reason_ = fmt::format("needs more than {} steps to compile", kMaxWork);
  } else if (work_ >= next_clock_check_) {
    next_clock_check_ = work_ + kWorkPerClockCheck;
    if (Clock::now() > deadline_) {
      reason_ = fmt::format("takes longer than {} s to compile", limits_.max_compile_s);
    }
  }
  return !exhausted();
}

}  // namespace tandem::grammar
