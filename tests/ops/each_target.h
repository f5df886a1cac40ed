// each_target.h — runs a check on every instruction set that this machine and this build support,
// the portable fallback included.
#pragma once

#include <cstdint>

#include "backends/cpu/simd_targets.h"
#include "hwy/highway.h"
#include "hwy/targets.h"

namespace tandem::test {

/// fn(name) with Highway's dispatch forced to one target after the other; restored afterwards.
template <typename Fn>
void for_each_simd_target(const Fn& fn) {
  const std::int64_t supported = hwy::SupportedTargets() & HWY_TARGETS;
  for (std::int64_t rest = supported; rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    fn(hwy::TargetName(target));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace tandem::test
