// linear_kernel.cpp — one block of y = x W^T: rows of x are copied to a dense scratch, panels are
// used in place or decoded to fp32 once for all row tiles.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "backends/cpu/gemm/targets.h"
#include "core/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/gemm/linear_kernel.cpp"
#include <hwy/foreach_target.h>
// After foreach_target: once per target.
#include <hwy/highway.h>

#include "backends/cpu/gemm/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::gemm::HWY_NAMESPACE {

/// Copies rows [begin, begin + rows) x [k, k + depth) of x to `to` at kXStride; rows up to `padded`
/// become 0.
HWY_INLINE void copy_rows(const LinearJob& job, std::int64_t begin, std::int64_t rows,
                          std::int64_t padded, std::int64_t k, std::int64_t depth, float* to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t row = job.x_rows == nullptr ? begin + r : job.x_rows[begin + r];
    std::memcpy(to + r * kXStride, job.x + row * job.x_stride + k,
                static_cast<std::size_t>(depth) * sizeof(float));
  }
  for (std::int64_t r = rows; r < padded; ++r) {
    std::fill_n(to + r * kXStride, depth, 0.0F);
  }
}

/// The panels of `weight` from (panel, k) on.
HWY_INLINE PanelRef panel_ref(const PackedWeight& weight, std::int64_t panel, std::int64_t k) {
  const std::int64_t lanes = panel_lanes(weight.format, weight.in);
  const std::int64_t group = group_size(weight.format);
  PanelRef ref;
  ref.words = weight.data.as<std::uint32_t>().data() + panel * lanes + k / group * kPanel;
  ref.word_stride = lanes;
  const std::int64_t block = scale_block(weight.format);
  if (block > 0) {
    ref.scale_stride = panel_scale_bytes(weight.format, weight.in);
    ref.scales = weight.scales.as<std::uint8_t>().data() + panel * ref.scale_stride +
                 k / block * kPanel * scale_bytes(weight.format);
  }
  ref.scale_2 = weight.scale_2;
  return ref;
}

template <typename Format>
void linear_block_of(const LinearJob& job, const LinearBlock& block, float* scratch) {
  const PackedWeight& weight = *job.weight;
  const std::int64_t rows = block.row_end - block.row_begin;
  const std::int64_t padded = rows / kTileRows * kTileRows + tile_height(rows % kTileRows);
  float* const x_scratch = scratch;
  // All of k at once when the rows fit: a panel is then read from end to end.
  const std::int64_t k_blocks = std::max<std::int64_t>(1, kXScratch / (padded * kXStride));
  const std::int64_t k_outer = k_blocks * kKBlock;
  TileArgs tile;
  tile.y_stride = job.y_stride;
  for (std::int64_t k0 = 0; k0 < weight.in || k0 == 0; k0 += k_outer) {
    const std::int64_t k1 = std::min(weight.in, k0 + k_outer);
    for (std::int64_t k = k0; k < k1; k += kKBlock) {
      copy_rows(job, block.row_begin, rows, padded, k, std::min(kKBlock, k1 - k),
                x_scratch + (k - k0) / kKBlock * padded * kXStride);
    }
    for (std::int64_t panel = block.panel_begin; panel < block.panel_end; panel += kTilePanels) {
      const bool whole = block.panel_end - panel >= kTilePanels;
      const std::int64_t out = panel * kPanel;
      tile.cols = static_cast<int>(std::min((whole ? kTilePanels : 1) * kPanel, weight.out - out));
      for (std::int64_t k = k0; k < k1 || k == 0; k += kKBlock) {
        tile.panels = panel_ref(weight, panel, k);
        tile.depth = std::min(kKBlock, k1 - k);
        tile.from_y = job.accumulate || k > 0;
        const float* x = x_scratch + (k - k0) / kKBlock * padded * kXStride;
        for (std::int64_t r = 0; r < rows; r += kTileRows) {
          tile.x = x + r * kXStride;
          tile.y = job.y + (block.row_begin + r) * job.y_stride + out;
          tile.rows = static_cast<int>(std::min<std::int64_t>(kTileRows, rows - r));
          if (whole) {
            run_tile<Format, RowMajorX, kTilePanels>(tile);
          } else {
            run_tile<Format, RowMajorX, 1>(tile);
          }
        }
      }
    }
  }
}

void linear_block(const LinearJob& job, const LinearBlock& block, float* scratch) {
  switch (job.weight->format) {
    case WeightFormat::kF32:
      return linear_block_of<F32Format>(job, block, scratch);
    case WeightFormat::kBF16:
      return linear_block_of<BF16Format>(job, block, scratch);
    default:
      TDM_CHECK(false, static_cast<int>(job.weight->format));
  }
}

}  // namespace tandem::gemm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::gemm {
HWY_EXPORT(linear_block);
void linear_block(const LinearJob& job, const LinearBlock& block, float* scratch) {
  HWY_DYNAMIC_DISPATCH(linear_block)(job, block, scratch);
}
}  // namespace tandem::gemm
#endif
