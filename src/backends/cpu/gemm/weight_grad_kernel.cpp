// weight_grad_kernel.cpp — d_w += d_y^T x with the same micro-kernel: the rows of d_w take the
// place of the rows of x, its columns that of the outputs, and the reduction runs over tokens.

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

HWY_INLINE std::int64_t padded_rows(std::int64_t n) {
  return ceil_div(n, kMaxTile) * kMaxTile;
}

void pack_weight_grad_d_y(const WeightGradJob& job, std::int64_t block) {
  const std::int64_t begin = block * kKBlock;
  const std::int64_t depth = std::min(kKBlock, job.rows - begin);
  float* const to = job.packed_d_y + block * kKBlock * padded_rows(job.n);
  const std::int64_t full = job.n / kTileRows * kTileRows;
  const std::int64_t rest = job.n - full;
  const std::int64_t height = tile_height(rest);
  for (std::int64_t t = 0; t < depth; ++t) {
    const float* from = job.d_y + (begin + t) * job.d_y_stride;
    for (std::int64_t n = 0; n < full; n += kTileRows) {
      std::memcpy(to + n * kKBlock + t * kTileRows, from + n, kTileRows * sizeof(float));
    }
    float* last = to + full * kKBlock + t * height;
    for (std::int64_t r = 0; r < height; ++r) {
      last[r] = r < rest ? from[full + r] : 0.0F;
    }
  }
}

void pack_weight_grad_x(const WeightGradJob& job, std::int64_t block) {
  const std::int64_t begin = block * kKBlock;
  const std::int64_t depth = std::min(kKBlock, job.rows - begin);
  float* const to = job.packed_x + block * num_panels(job.k) * kXPanelFloats;
  const std::int64_t full = job.k / kPanel;
  const std::int64_t rest = job.k % kPanel;
  for (std::int64_t t = 0; t < depth; ++t) {
    const std::int64_t row = job.x_rows == nullptr ? begin + t : job.x_rows[begin + t];
    const float* from = job.x + row * job.x_stride;
    for (std::int64_t panel = 0; panel < full; ++panel) {
      std::memcpy(to + panel * kXPanelFloats + t * kPanel, from + panel * kPanel,
                  kPanel * sizeof(float));
    }
    if (rest > 0) {
      float* last = to + full * kXPanelFloats + t * kPanel;
      for (std::int64_t i = 0; i < kPanel; ++i) {
        last[i] = i < rest ? from[full * kPanel + i] : 0.0F;
      }
    }
  }
}

void weight_grad_block(const WeightGradJob& job, std::int64_t n_begin, std::int64_t n_end,
                       std::int64_t panel_begin, std::int64_t panel_end) {
  TileArgs tile;
  tile.y_stride = job.d_w_stride;
  tile.from_y = true;
  tile.panels.word_stride = kXPanelFloats;
  const std::int64_t blocks = ceil_div(job.rows, kKBlock);
  for (std::int64_t block = 0; block < blocks; ++block) {
    tile.depth = std::min(kKBlock, job.rows - block * kKBlock);
    const float* d_y = job.packed_d_y + block * kKBlock * padded_rows(job.n);
    const float* x = job.packed_x + block * num_panels(job.k) * kXPanelFloats;
    for (std::int64_t panel = panel_begin; panel < panel_end; panel += kTilePanels) {
      const int panels = static_cast<int>(std::min<std::int64_t>(kTilePanels, panel_end - panel));
      tile.cols = static_cast<int>(std::min(panels * kPanel, job.k - panel * kPanel));
      tile.panels.words = reinterpret_cast<const std::uint32_t*>(x + panel * kXPanelFloats);
      for (std::int64_t n = n_begin; n < n_end; n += kTileRows) {
        tile.x = d_y + n * kKBlock;
        tile.y = job.d_w + n * job.d_w_stride + panel * kPanel;
        tile.rows = static_cast<int>(std::min<std::int64_t>(kTileRows, n_end - n));
        run_tile<F32Format, ColMajorX>(tile, panels);
      }
    }
  }
}

}  // namespace tandem::gemm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::gemm {
HWY_EXPORT(pack_weight_grad_d_y);
HWY_EXPORT(pack_weight_grad_x);
HWY_EXPORT(weight_grad_block);

void pack_weight_grad_d_y(const WeightGradJob& job, std::int64_t block) {
  HWY_DYNAMIC_DISPATCH(pack_weight_grad_d_y)(job, block);
}
void pack_weight_grad_x(const WeightGradJob& job, std::int64_t block) {
  HWY_DYNAMIC_DISPATCH(pack_weight_grad_x)(job, block);
}
void weight_grad_block(const WeightGradJob& job, std::int64_t n_begin, std::int64_t n_end,
                       std::int64_t panel_begin, std::int64_t panel_end) {
  HWY_DYNAMIC_DISPATCH(weight_grad_block)(job, n_begin, n_end, panel_begin, panel_end);
}
}  // namespace tandem::gemm
#endif
