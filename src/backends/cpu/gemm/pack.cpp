#include "backends/cpu/gemm/pack.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "backends/cpu/gemm/panel.h"
#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem::gemm {
namespace {

static_assert(std::endian::native == std::endian::little,
              "a lane is read as 4 bytes of a row: the first index in the low bits");

void resize(Storage& storage, std::int64_t bytes) {
  if (storage.size_bytes() != bytes) {
    storage = Storage(bytes);
  }
}

std::int64_t bits_of(WeightFormat format) {
  return 32 / group_size(format);
}

/// Output n of the panel is row n of the weight: a transposition of 32-bit lanes. Every format
/// stores the reduction index along the row, low bits first, so 4 bytes of a row are one lane.
void pack_rows(std::byte* to, const WeightRef& weight, std::int64_t panel) {
  const std::int64_t lanes = panel_lanes(weight.format, weight.cols) / kPanel;
  const std::int64_t row_bytes = ceil_div(weight.cols * bits_of(weight.format), 8);
  const std::int64_t stride =
      weight.format == WeightFormat::kF32 || weight.format == WeightFormat::kBF16
          ? weight.row_stride * bits_of(weight.format) / 8
          : row_bytes;
  const std::int64_t rows = std::min(kPanel, weight.rows - panel * kPanel);
  const auto* from = static_cast<const std::byte*>(weight.data) + panel * kPanel * stride;
  constexpr std::int64_t kStep = 16;  // lanes a visit: a cache line of every row
  for (std::int64_t begin = 0; begin < lanes; begin += kStep) {
    const std::int64_t end = std::min(lanes, begin + kStep);
    for (std::int64_t n = 0; n < kPanel; ++n) {
      for (std::int64_t i = begin; i < end; ++i) {
        std::uint32_t lane = 0;
        if (n < rows) {
          const std::int64_t bytes = std::min<std::int64_t>(4, row_bytes - 4 * i);
          if (bytes == 4) [[likely]] {
            std::memcpy(&lane, from + n * stride + 4 * i, 4);
          } else {
            std::memcpy(&lane, from + n * stride + 4 * i, usize(bytes));
          }
        }
        std::memcpy(to + 4 * (i * kPanel + n), &lane, 4);
      }
    }
  }
}

/// Output n of the panel is column n of the weight; the reduction runs over rows.
void pack_columns_f32(std::byte* to, const WeightRef& weight, std::int64_t panel) {
  const std::int64_t cols = std::min(kPanel, weight.cols - panel * kPanel);
  const auto* from = static_cast<const float*>(weight.data) + panel * kPanel;
  for (std::int64_t k = 0; k < weight.rows; ++k, to += 4 * kPanel) {
    std::memcpy(to, from + k * weight.row_stride, usize(cols) * sizeof(float));
    std::fill(to + 4 * cols, to + 4 * kPanel, std::byte{0});
  }
}

void pack_columns_bf16(std::byte* to, const WeightRef& weight, std::int64_t panel) {
  const std::int64_t cols = std::min(kPanel, weight.cols - panel * kPanel);
  const auto* from = static_cast<const std::uint16_t*>(weight.data) + panel * kPanel;
  for (std::int64_t k = 0; k < weight.rows; k += 2, to += 4 * kPanel) {
    const std::uint16_t* low = from + k * weight.row_stride;
    const std::uint16_t* high = k + 1 < weight.rows ? low + weight.row_stride : nullptr;
    for (std::int64_t n = 0; n < kPanel; ++n) {
      const std::uint32_t upper = n < cols && high != nullptr ? std::uint32_t{high[n]} : 0U;
      const std::uint32_t lane = (n < cols ? std::uint32_t{low[n]} : 0U) | upper << 16;
      std::memcpy(to + 4 * n, &lane, 4);
    }
  }
}

/// MXFP4 and NVFP4: the scale bytes of 16 outputs side by side, block after block.
void pack_byte_scales(std::uint8_t* to, const WeightRef& weight, std::int64_t panel) {
  const std::int64_t blocks = ceil_div(weight.cols, scale_block(weight.format));
  const auto* from = static_cast<const std::uint8_t*>(weight.scales) + panel * kPanel * blocks;
  const std::int64_t rows = std::min(kPanel, weight.rows - panel * kPanel);
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (std::int64_t n = 0; n < kPanel; ++n) {
      // Padding rows have codes 0; a scale of 1 keeps them out of the way of is_tame().
      const std::uint8_t one = weight.format == WeightFormat::kMxFp4 ? 127 : 0x38;
      to[block * kPanel + n] = n < rows ? from[n * blocks + block] : one;
    }
  }
}

constexpr std::int64_t kFp8Block = 128;

/// FP8: one fp32 a lane, times 2^120: the kernel's code values are that much too small. A NaN code
/// makes all results of its row NaN whatever x is, so it is moved to the scale and the kernel need
/// not look for it.
void pack_fp8_scales(float* to, const WeightRef& weight, std::int64_t panel) {
  const std::int64_t blocks = ceil_div(weight.cols, kFp8Block);
  const float* from =
      static_cast<const float*>(weight.scales) + panel * kPanel / kFp8Block * blocks;
  const auto* codes = static_cast<const std::uint8_t*>(weight.data);
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (std::int64_t n = 0; n < kPanel; ++n) {
      const std::int64_t row = panel * kPanel + n;
      float scale = row < weight.rows ? from[block] * 0x1.0p120F : 1.0F;
      if (row < weight.rows) {
        const std::uint8_t* begin = codes + row * weight.cols + block * kFp8Block;
        const std::uint8_t* end = begin + std::min(kFp8Block, weight.cols - block * kFp8Block);
        if (std::any_of(begin, end, [](std::uint8_t c) { return (c & 0x7FU) == 0x7FU; })) {
          scale = std::numeric_limits<float>::quiet_NaN();
        }
      }
      to[block * kPanel + n] = scale;
    }
  }
}

void check(const WeightRef& weight, Orientation orientation) {
  const std::int64_t block = scale_block(weight.format);
  TDM_CHECK(weight.rows >= 0 && weight.cols >= 0, weight.rows, weight.cols);
  TDM_CHECK(weight.data != nullptr || weight.rows * weight.cols == 0);
  if (block == 0) {
    TDM_CHECK(weight.row_stride >= weight.cols || weight.rows <= 1, weight.row_stride, weight.cols);
    return;
  }
  TDM_CHECK(orientation == Orientation::kNormal, "only kF32 and kBF16 can be transposed");
  TDM_CHECK(weight.scales != nullptr || weight.rows * weight.cols == 0);
  TDM_CHECK(weight.format == WeightFormat::kFp8Block || weight.cols % block == 0, weight.cols,
            block);
}

}  // namespace

void pack(const ExecCtx& ctx, PackedWeight& packed, const WeightRef& weight,
          Orientation orientation) {
  check(weight, orientation);
  const bool transposed = orientation == Orientation::kTransposed;
  packed.format = weight.format;
  packed.out = transposed ? weight.cols : weight.rows;
  packed.in = transposed ? weight.rows : weight.cols;
  packed.scale_2 = weight.scale_2;
  const std::int64_t panels = num_panels(packed.out);
  const std::int64_t lanes = panel_lanes(packed.format, packed.in);
  const std::int64_t scales = panel_scale_bytes(packed.format, packed.in);
  resize(packed.data, panels * lanes * 4 + kDataPadding);
  resize(packed.scales, scales == 0 ? 0 : panels * scales + kScaleFooter);
  std::byte* const words =
      packed.data.data() + (weight.format == WeightFormat::kFp8Block ? kFp8Offset : 0);
  auto* const scale_bytes_at = packed.scales.as<std::uint8_t>().data();
  const auto pack_panel = [&](std::int64_t panel) {
    std::byte* to = words + panel * lanes * 4;
    std::uint8_t* scales_to = scale_bytes_at + panel * scales;
    if (!transposed) {
      pack_rows(to, weight, panel);
    } else if (weight.format == WeightFormat::kF32) {
      pack_columns_f32(to, weight, panel);
    } else {
      pack_columns_bf16(to, weight, panel);
    }
    if (weight.format == WeightFormat::kFp8Block) {
      pack_fp8_scales(reinterpret_cast<float*>(scales_to), weight, panel);
    } else if (scales > 0) {
      pack_byte_scales(scales_to, weight, panel);
    }
  };
  // About 256 KiB a block: a small weight is packed by the caller alone.
  const std::int64_t per_block =
      std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(lanes, 1));
  ctx.pool->parallel_for(ceil_div(panels, per_block), [&](std::int64_t block, int) {
    for (std::int64_t panel = block * per_block; panel < std::min(panels, (block + 1) * per_block);
         ++panel) {
      pack_panel(panel);
    }
  });
  if (weight.format == WeightFormat::kMxFp4) {
    const std::span<const std::uint8_t> codes(scale_bytes_at, usize(panels * scales));
    const bool tame = std::all_of(codes.begin(), codes.end(), [](std::uint8_t code) {
      return code >= kTameMinScale && code <= kTameMaxScale;
    });
    packed.scales.data()[panels * scales] = std::byte{tame};
  }
}

}  // namespace tandem::gemm
