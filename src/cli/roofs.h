// roofs.h — what a machine can move and compute at most, measured in the same run as what is
// compared with it.
#pragma once

#include <algorithm>
#include <string>

#include "ops/exec_ctx.h"

namespace tandem::cli {

struct Roofs {
  double bytes_per_s = 0;
  double flops_per_s = 0;  // 0: not known

  /// Seconds that moving `bytes` and computing `flops` take at least, one beside the other.
  [[nodiscard]] double seconds(double bytes, double flops) const {
    const double moving = bytes_per_s > 0 ? bytes / bytes_per_s : 0;
    const double computing = flops_per_s > 0 ? flops / flops_per_s : 0;
    return std::max(moving, computing);
  }
};

/// Bytes a second: copying 2 GiB inside a device, read and written; on the host, reading 1 GiB with
/// all threads. Operations a second: the device's own word.
[[nodiscard]] Roofs measure_roofs(const ExecCtx& ctx);
/// For a table's head: "4,240 GB/s of copying inside the device".
[[nodiscard]] std::string describe(const Roofs& roofs, const Device& device);

}  // namespace tandem::cli
