// linear_kernel.cpp — one block of y = x W^T: rows of x are copied to a dense scratch, panels are
// used in place or decoded to fp32 once for all row tiles.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "backends/cpu/gemm/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/gemm/linear_kernel.cpp"
#include <hwy/foreach_target.h>
// After foreach_target: once per target.
#include <hwy/highway.h>

#include "backends/cpu/gemm/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::gemm::HWY_NAMESPACE {

/// to[i] = from[i]. A loop because memcpy of a run-time size becomes `rep movs`, which starts
/// slowly.
HWY_INLINE void copy_floats(const float* from, std::int64_t count, float* to) {
  const Floats d;
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    const VF a = hn::LoadU(d, from + i);
    const VF b = hn::LoadU(d, from + i + kLanes);
    const VF c = hn::LoadU(d, from + i + 2 * kLanes);
    const VF e = hn::LoadU(d, from + i + 3 * kLanes);
    hn::StoreU(a, d, to + i);
    hn::StoreU(b, d, to + i + kLanes);
    hn::StoreU(c, d, to + i + 2 * kLanes);
    hn::StoreU(e, d, to + i + 3 * kLanes);
  }
  for (; i < count; ++i) {
    to[i] = from[i];
  }
}

/// Copies rows [begin, begin + rows) x [k, k + depth) of x to `to` at kXStride; rows up to `padded`
/// become 0.
HWY_INLINE void copy_rows(const LinearJob& job, std::int64_t begin, std::int64_t rows,
                          std::int64_t padded, std::int64_t k, std::int64_t depth, float* to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t row = job.x_rows == nullptr ? begin + r : job.x_rows[begin + r];
    copy_floats(job.x + row * job.x_stride + k, depth, to + r * kXStride);
  }
  for (std::int64_t r = rows; r < padded; ++r) {
    std::fill_n(to + r * kXStride, depth, 0.0F);
  }
}

/// Whether all of a job's rows in the block are zeros or in [kTameMinX, kTameMaxX].
bool tame_rows(const LinearJob& job, const LinearBlock& block) {
  const Words d;
  const VU low = hn::Set(d, std::bit_cast<std::uint32_t>(kTameMinX));
  const VU span =
      hn::Set(d, std::bit_cast<std::uint32_t>(kTameMaxX) - std::bit_cast<std::uint32_t>(kTameMinX));
  const VU magnitude = hn::Set(d, 0x7FFFFFFFU);
  for (std::int64_t r = block.row_begin; r < block.row_end; ++r) {
    const std::int64_t row = job.x_rows == nullptr ? r : job.x_rows[r];
    const auto* bits = reinterpret_cast<const std::uint32_t*>(job.x + row * job.x_stride);
    // max(bits - low) wraps around for what is below; zeros are set to low.
    VU largest = hn::Zero(d);
    std::int64_t i = 0;
    for (; i + kLanes <= job.weight->in; i += kLanes) {
      const VU value = hn::And(hn::LoadU(d, bits + i), magnitude);
      const VU above = hn::IfThenZeroElse(hn::Eq(value, hn::Zero(d)), hn::Sub(value, low));
      largest = hn::Max(largest, above);
    }
    if (!hn::AllTrue(d, hn::Eq(hn::Max(largest, span), span))) {
      return false;
    }
    for (; i < job.weight->in; ++i) {
      const float value = std::abs(job.x[row * job.x_stride + i]);
      if (value != 0.0F && !(value >= kTameMinX && value <= kTameMaxX)) {
        return false;
      }
    }
  }
  return true;
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

/// One panel's values in fp32, [depth][16].
template <typename Format, int... kIndex>
HWY_INLINE void decode_panel(std::integer_sequence<int, kIndex...>, const PanelRef& panel,
                             std::int64_t depth, float* to) {
  constexpr std::int64_t kChunk =
      scale_block(Format::kFormat) == 0 ? kKBlock : scale_block(Format::kFormat);
  const Floats d;
  const std::uint8_t* scales = panel.scales;
  for (std::int64_t k = 0; k < depth; k += kChunk) {
    for (int i = 0; i < kVectors; ++i) {
      const VF scale =
          Format::scale(scales + i * kLanes * scale_bytes(Format::kFormat), panel.scale_2);
      const std::int64_t end = std::min(depth, k + kChunk);
      for (std::int64_t at = k; at < end; at += Format::kGroup) {
        const std::uint32_t* words = panel.words + at / Format::kGroup * kPanel + i * kLanes;
        float* out = to + at * kPanel + i * kLanes;
        // The padding of the last group is written as well: kPanelScratch has room.
        (hn::StoreU(Format::template take<kIndex>(words, scale), d, out + kIndex * kPanel), ...);
      }
    }
    scales += kPanel * scale_bytes(Format::kFormat);
  }
}

/// The panels of a tile in fp32: in place when they are, else decoded to `scratch`.
template <typename Format>
HWY_INLINE PanelRef fp32_panels(const PanelRef& from, int panels, std::int64_t depth,
                                float* scratch) {
  if constexpr (Format::kGroup == 1) {
    return from;
  } else {
    PanelRef panel = from;
    for (int p = 0; p < panels; ++p) {
      decode_panel<Format>(std::make_integer_sequence<int, Format::kGroup>(), panel, depth,
                           scratch + p * kKBlock * kPanel);
      panel.words += from.word_stride;
      panel.scales += from.scale_stride;
    }
    PanelRef result;
    result.words = reinterpret_cast<const std::uint32_t*>(scratch);
    result.word_stride = kKBlock * kPanel;
    return result;
  }
}

// Packed formats: the tile that decodes in registers. Up to two of them are cheaper than a detour
// through memory.
inline constexpr std::int64_t kDirectTile = kVectors == 1 ? 8 : 4;

template <typename Format>
void linear_block_of(const LinearJob& job, const LinearBlock& block, float* scratch) {
  const PackedWeight& weight = *job.weight;
  const std::int64_t rows = block.row_end - block.row_begin;
  const bool direct = Format::kGroup == 1 || rows <= 2 * kDirectTile;
  const std::int64_t height =
      rows <= 2 * kDirectTile && (rows > kTileRows || Format::kGroup > 1) ? kDirectTile : kTileRows;
  const std::int64_t padded = rows / height * height + tile_height(rows % height);
  float* const panel_scratch = scratch + kXScratch;
  // All of k at once when the rows fit: a panel is then read from end to end.
  const std::int64_t k_outer = std::max<std::int64_t>(1, kXScratch / (padded * kXStride)) * kKBlock;
  const int group =
      rows > height ? kTilePanels : widest<Format>(static_cast<int>(tile_height(rows)));
  TileArgs tile;
  tile.y_stride = job.y_stride;
  for (std::int64_t k0 = 0; k0 < weight.in || k0 == 0; k0 += k_outer) {
    const std::int64_t k1 = std::min(weight.in, k0 + k_outer);
    for (std::int64_t k = k0; k < k1; k += kKBlock) {
      copy_rows(job, block.row_begin, rows, padded, k, std::min(kKBlock, k1 - k),
                scratch + (k - k0) / kKBlock * padded * kXStride);
    }
    for (std::int64_t panel = block.panel_begin; panel < block.panel_end; panel += group) {
      const int panels = static_cast<int>(std::min<std::int64_t>(group, block.panel_end - panel));
      const std::int64_t out = panel * kPanel;
      tile.cols = static_cast<int>(std::min(panels * kPanel, weight.out - out));
      for (std::int64_t k = k0; k < k1 || k == 0; k += kKBlock) {
        tile.depth = std::min(kKBlock, k1 - k);
        tile.panels = panel_ref(weight, panel, k);
        if (!direct) {
          tile.panels = fp32_panels<Format>(tile.panels, panels, tile.depth, panel_scratch);
        }
        tile.from_y = job.accumulate || k > 0;
        const float* x = scratch + (k - k0) / kKBlock * padded * kXStride;
        for (std::int64_t r = 0; r < rows; r += height) {
          tile.x = x + r * kXStride;
          tile.y = job.y + (block.row_begin + r) * job.y_stride + out;
          tile.rows = static_cast<int>(std::min(height, rows - r));
          tile.prefetch = nullptr;
          if (direct && panel + 2 * group <= block.panel_end) {
            const std::int64_t i = r / height;
            tile.prefetch =
                i < 4 * group ? reinterpret_cast<const char*>(
                                    tile.panels.words + (group + i / 4) * tile.panels.word_stride +
                                    (i % 4) * (tile.depth / 4 * kPanel))
                              : nullptr;
          }
          if (direct) {
            run_tile<Format, CopiedRows>(tile, panels);
          } else {
            run_tile<F32Format, CopiedRows>(tile, panels);
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
    case WeightFormat::kMxFp4:
      if (block.row_end - block.row_begin <= 2 * kDirectTile && !job.accumulate &&
          is_tame(*job.weight) && tame_rows(job, block)) {
        return linear_block_of<MxFp4TameFormat>(job, block, scratch);
      }
      return linear_block_of<MxFp4Format>(job, block, scratch);
    case WeightFormat::kNvFp4:
      return linear_block_of<NvFp4Format>(job, block, scratch);
    case WeightFormat::kFp8Block:
      return linear_block_of<Fp8BlockFormat>(job, block, scratch);
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
