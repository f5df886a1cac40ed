// weight_grad_kernel.cpp — d_w += d_y^T x with the same micro-kernel: the rows of d_w take the
// place of the rows of x, its columns that of the outputs, and the reduction runs over tokens. Both
// operands are read where they are: a tile wants 48 bytes of a row of d_y and 128 of a row of x, so
// the second-level cache keeps up and packing would cost more than it saves.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "backends/cpu/gemm/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/gemm/weight_grad_kernel.cpp"
#include <hwy/foreach_target.h>
// After foreach_target: once per target.
#include <hwy/highway.h>

#include "backends/cpu/gemm/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::gemm::HWY_NAMESPACE {

/// The tallest compiled tile of at most `rows` rows: none may read beside the rows of d_y.
HWY_INLINE std::int64_t exact_height(std::int64_t rows) {
  return rows >= kTileRows             ? kTileRows
         : rows >= 8 && kTileRows >= 8 ? 8
         : rows >= 4                   ? 4
         : rows >= 2                   ? 2
                                       : 1;
}

HWY_INLINE const float* row_of_x(const WeightGradJob& job, std::int64_t t) {
  return job.x + (job.x_rows == nullptr ? t : job.x_rows[t]) * job.x_stride;
}

/// Columns [k, k + cols) of rows [begin, begin + depth) of x as panels of [depth][16], 0 beyond.
HWY_INLINE void copy_x(const WeightGradJob& job, std::int64_t begin, std::int64_t depth,
                       std::int64_t k, std::int64_t cols, float* to) {
  for (std::int64_t t = 0; t < depth; ++t) {
    const float* from = row_of_x(job, begin + t) + k;
    for (std::int64_t i = 0; i < cols; i += kPanel) {
      float* panel = to + i * kKBlock + t * kPanel;
      if (cols - i >= kPanel) {
        std::memcpy(panel, from + i, kPanel * sizeof(float));
      } else {
        std::copy_n(from + i, cols - i, panel);
        std::fill(panel + (cols - i), panel + kPanel, 0.0F);
      }
    }
  }
}

/// Columns of d_y as tiles of [depth][height], each at (its first column) * kKBlock.
HWY_INLINE void copy_d_y(const WeightGradJob& job, std::int64_t begin, std::int64_t depth,
                         std::int64_t n_begin, std::int64_t n_end, float* to) {
  const std::int64_t full = (n_end - n_begin) / kTileRows * kTileRows;
  for (std::int64_t t = 0; t < depth; ++t) {
    const float* from = job.d_y + (begin + t) * job.d_y_stride + n_begin;
    std::int64_t n = 0;
    for (; n < full; n += kTileRows) {
      std::memcpy(to + n * kKBlock + t * kTileRows, from + n, kTileRows * sizeof(float));
    }
    for (std::int64_t height = 0; n < n_end - n_begin; n += height) {
      height = exact_height(n_end - n_begin - n);
      std::copy_n(from + n, height, to + n * kKBlock + t * height);
    }
  }
}

void weight_grad_block(const WeightGradJob& job, const LinearBlock& block, float* scratch) {
  const std::int64_t panels_here = block.panel_end - block.panel_begin;
  // Where the last panel is not whole or rows are gathered, panels are copied from `copied` on.
  const bool ragged = block.panel_end * kPanel > job.k;
  const std::int64_t copied = job.x_rows != nullptr ? block.panel_begin
                              : ragged ? block.panel_end - 1 - (panels_here - 1) % kTilePanels
                                       : block.panel_end;
  const bool copy_tile = panels_here > 2 * kTilePanels;  // d_y's, then in the first-level cache
  float* const d_y_scratch = scratch + kMaxGradPanels * kKBlock * kPanel;
  TileArgs tile;
  tile.y_stride = job.d_w_stride;
  tile.from_y = true;
  for (std::int64_t begin = 0; begin < job.rows; begin += kKBlock) {
    tile.depth = std::min(kKBlock, job.rows - begin);
    if (copied < block.panel_end) {
      copy_x(job, begin, tile.depth, copied * kPanel,
             std::min(job.k, block.panel_end * kPanel) - copied * kPanel, scratch);
    }
    if (copy_tile) {
      copy_d_y(job, begin, tile.depth, block.row_begin, block.row_end, d_y_scratch);
    }
    for (std::int64_t n = block.row_begin; n < block.row_end; n += tile.rows) {
      tile.rows = static_cast<int>(exact_height(block.row_end - n));
      tile.x = job.d_y + begin * job.d_y_stride + n;
      tile.x_step = job.d_y_stride;
      if (copy_tile) {
        tile.x = d_y_scratch + (n - block.row_begin) * kKBlock;
        tile.x_step = tile.rows;
      }
      for (std::int64_t panel = block.panel_begin; panel < block.panel_end; panel += kTilePanels) {
        const int panels =
            static_cast<int>(std::min<std::int64_t>(kTilePanels, block.panel_end - panel));
        const bool from_copy = panel >= copied;
        const float* x = from_copy ? scratch + (panel - copied) * kKBlock * kPanel
                                   : job.x + begin * job.x_stride + panel * kPanel;
        tile.panels.words = reinterpret_cast<const std::uint32_t*>(x);
        tile.panels.word_stride = from_copy ? kKBlock * kPanel : kPanel;
        tile.word_step = from_copy ? kPanel : job.x_stride;
        tile.cols = static_cast<int>(std::min(panels * kPanel, job.k - panel * kPanel));
        tile.y = job.d_w + n * job.d_w_stride + panel * kPanel;
        run_tile<F32Format, InPlace>(tile, panels);
      }
    }
  }
}

}  // namespace tandem::gemm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::gemm {
HWY_EXPORT(weight_grad_block);
void weight_grad_block(const WeightGradJob& job, const LinearBlock& block, float* scratch) {
  HWY_DYNAMIC_DISPATCH(weight_grad_block)(job, block, scratch);
}
}  // namespace tandem::gemm
#endif
