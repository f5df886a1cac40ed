// choose_kda.h — how the KDA kernels cut their work: pure functions of shape and device. No choice
// changes a bit of the results.
#pragma once

#include <cstdint>

#include "backends/cuda/runtime/device_info.h"

namespace tandem::cuda {

constexpr std::int64_t kColumnLanesOfWarp = 4;
constexpr int kMostStateWarps = 4;

struct RecurrenceDesc {
  std::int64_t seqs = 0;
  std::int64_t rows = 0;  // of all sequences
  std::int64_t heads = 0;
  std::int64_t values = 0;
  int adjacent = 1;  // state columns that one access may move: 1, 2 or 4
};

struct RecurrencePlan {
  int columns = 1;      // state columns a lane: 1, 2 or 4
  int state_warps = 1;  // of a block
  int chunk = 1;        // tokens of a stage of the ring; divides kKdaCheckpointRows

  [[nodiscard]] constexpr std::int64_t column_blocks(std::int64_t values) const {
    const std::int64_t of_block = kColumnLanesOfWarp * columns * state_warps;
    return (values + of_block - 1) / of_block;
  }
  bool operator==(const RecurrencePlan&) const = default;
};

[[nodiscard]] RecurrencePlan choose_recurrence(const RecurrenceDesc& desc, const DeviceInfo& info);

/// Warps of a block of the kernel for one token.
constexpr int kDecodeWarps = 8;

/// Columns a lane of that kernel, 1, 2 or 4, for `items` states of 128 columns: a cluster of 4, 2
/// or 1 blocks an item.
[[nodiscard]] int choose_decode_columns(std::int64_t items, const DeviceInfo& info);

}  // namespace tandem::cuda
