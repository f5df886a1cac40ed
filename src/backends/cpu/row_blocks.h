// row_blocks.h — cuts the rows of an op into fixed blocks for the thread pool. The cut depends on
// the shape only, never on the number of threads, so neither do results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "ops/exec_ctx.h"

namespace tandem {

struct RowBlocks {
  std::int64_t rows = 0;
  std::int64_t rows_per_block = 1;

  [[nodiscard]] std::int64_t count() const { return (rows + rows_per_block - 1) / rows_per_block; }
  [[nodiscard]] std::int64_t begin(std::int64_t block) const { return block * rows_per_block; }
  [[nodiscard]] std::int64_t end(std::int64_t block) const {
    return std::min(rows, (block + 1) * rows_per_block);
  }
};

/// Blocks of about 20 us (the cost of waking a worker), at least `min_rows` each.
/// ns_per_row: a rough estimate of one row's time on one core.
[[nodiscard]] inline RowBlocks row_blocks(std::int64_t rows, double ns_per_row,
                                          std::int64_t min_rows = 1) {
  constexpr double kBlockNs = 20000.0;
  constexpr double kMaxRows = 1 << 20;
  const double per_block = std::clamp(kBlockNs / std::max(ns_per_row, 1e-3), 1.0, kMaxRows);
  return {rows, std::max(min_rows, static_cast<std::int64_t>(per_block))};
}

/// fn(begin, end, block) over all blocks.
template <typename Fn>
void parallel_rows(const ExecCtx& ctx, const RowBlocks& blocks, const Fn& fn) {
  ctx.pool->parallel_for(blocks.count(), [&](std::int64_t block, int) {
    fn(blocks.begin(block), blocks.end(block), block);
  });
}

/// count x n zeroed floats of the workspace: one row of partial sums a block.
[[nodiscard]] inline std::span<float> take_zeroed(const ExecCtx& ctx, std::int64_t count,
                                                  std::int64_t n) {
  const std::span<float> partials = ctx.workspace->take<float>(count * n);
  std::fill(partials.begin(), partials.end(), 0.0F);
  return partials;
}

}  // namespace tandem
