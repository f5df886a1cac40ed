// panel.h — the packed weight layout and the work items of the matrix kernels.
//
// A weight [out, in] is cut into panels of 16 outputs. A panel is a sequence of 64-byte words: 16
// lanes of 32 bits, lane n for output 16 p + n, and every lane holds `group` consecutive reduction
// indices, the first in its low bits: 1 fp32, 2 bf16, 4 fp8 or 8 four-bit codes. So a kernel takes
// one output per SIMD lane and no lane ever talks to another: a chain over k is one register.
// Scales lie beside, 16 a panel and scale block: one byte each for MXFP4 (E8M0) and NVFP4 (E4M3),
// an fp32 for FP8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/gemm.h"

namespace tandem::gemm {

inline constexpr std::int64_t kPanel = 16;    // outputs a panel
inline constexpr std::int64_t kKBlock = 512;  // reduction indices between two visits of y

/// Reduction indices in one 32-bit lane.
[[nodiscard]] constexpr std::int64_t group_size(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return 1;
    case WeightFormat::kBF16:
      return 2;
    case WeightFormat::kFp8Block:
      return 4;
    case WeightFormat::kMxFp4:
    case WeightFormat::kNvFp4:
      return 8;
  }
  return 1;
}

/// Reduction indices that share a scale; 0 when there are none.
[[nodiscard]] constexpr std::int64_t scale_block(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
    case WeightFormat::kBF16:
      return 0;
    case WeightFormat::kFp8Block:
      return 128;
    case WeightFormat::kMxFp4:
      return 32;
    case WeightFormat::kNvFp4:
      return 16;
  }
  return 0;
}

/// Bytes of one scale.
[[nodiscard]] constexpr std::int64_t scale_bytes(WeightFormat format) {
  return scale_block(format) == 0 ? 0 : format == WeightFormat::kFp8Block ? 4 : 1;
}

[[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
[[nodiscard]] constexpr std::int64_t num_panels(std::int64_t out) {
  return ceil_div(out, kPanel);
}
/// 32-bit lanes of one panel.
[[nodiscard]] constexpr std::int64_t panel_lanes(WeightFormat format, std::int64_t in) {
  return ceil_div(in, group_size(format)) * kPanel;
}
/// Bytes of the scales of one panel.
[[nodiscard]] constexpr std::int64_t panel_scale_bytes(WeightFormat format, std::int64_t in) {
  const std::int64_t block = scale_block(format);
  return block == 0 ? 0 : ceil_div(in, block) * kPanel * scale_bytes(format);
}

// Words may be read from any byte of theirs on, so data ends with padding; FP8 codes start
// kFp8Offset bytes into it.
inline constexpr std::int64_t kDataPadding = 64;
inline constexpr std::int64_t kFp8Offset = 3;
// Scales end with one line whose first byte tells whether the weight is tame: MXFP4 with exponents
// in [kTameMinScale, kTameMaxScale].
inline constexpr std::int64_t kScaleFooter = 64;

// When all scales of a weight and all x but zeros lie in these ranges of powers of two, a chain may
// run on y / scale without a change of one bit. Products are multiples of 2^(-40 - 23 - 1 - 30) =
// 2^-94, hence so are all sums, rounded or not; in units of a scale they are multiples of 2^-104
// and, with 2^20 terms, below 2^(20 + 40 + 3 + 10 + 30) = 2^103. So nothing but 0 is subnormal,
// nothing overflows, and a power of two commutes with rounding.
inline constexpr int kTameMinScale = 127 - 30;  // E8M0 codes
inline constexpr int kTameMaxScale = 127 + 10;
inline constexpr float kTameMinX = 0x1p-40F;
inline constexpr float kTameMaxX = 0x1p+40F;
inline constexpr std::int64_t kTameMaxDepth = std::int64_t{1} << 20;

[[nodiscard]] inline bool is_tame(const PackedWeight& weight) {
  return weight.format == WeightFormat::kMxFp4 && weight.in <= kTameMaxDepth &&
         weight.scales.data()[weight.scales.size_bytes() - kScaleFooter] != std::byte{0};
}

/// y = x W^T for a set of rows; a job of a grouped call (heads, experts).
struct LinearJob {
  float* y = nullptr;  // [rows, out]
  std::int64_t y_stride = 0;
  const float* x = nullptr;  // [rows, in], or row x_rows[t] of it
  std::int64_t x_stride = 0;
  const std::int32_t* x_rows = nullptr;  // [rows] or null
  std::int64_t rows = 0;
  const PackedWeight* weight = nullptr;
  bool accumulate = false;
};

/// The part of a job that one thread does at a time.
struct LinearBlock {
  std::int64_t row_begin = 0, row_end = 0;
  std::int64_t panel_begin = 0, panel_end = 0;
};

// Scratch of one thread: rows of x for one block, and one group of panels decoded to fp32.
inline constexpr std::int64_t kMaxBlockRows = 192;
inline constexpr std::int64_t kXStride = kKBlock + 16;  // the 16 keep rows out of one cache set
inline constexpr std::int64_t kXScratch = kMaxBlockRows * kXStride;
inline constexpr std::int64_t kMaxGroup = 4;  // panels
inline constexpr std::int64_t kPanelScratch = kMaxGroup * kKBlock * kPanel;
inline constexpr std::int64_t kLinearScratch = kXScratch + kPanelScratch;

/// Computes one block. `scratch`: kLinearScratch floats, 64-byte aligned.
void linear_block(const LinearJob& job, const LinearBlock& block, float* scratch);

/// Runs all jobs, cut into blocks, on the thread pool.
void run_linear(const ExecCtx& ctx, std::span<const LinearJob> jobs);

/// d_w += d_y^T x.
struct WeightGradJob {
  float* d_w = nullptr;  // [n, k]
  std::int64_t d_w_stride = 0;
  const float* d_y = nullptr;  // [rows, n]
  std::int64_t d_y_stride = 0;
  const float* x = nullptr;  // [rows, k], or row x_rows[t] of it
  std::int64_t x_stride = 0;
  const std::int32_t* x_rows = nullptr;  // [rows] or null
  std::int64_t rows = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
};

inline constexpr std::int64_t kMaxTile = 12;  // every target's tile height divides it

inline constexpr std::int64_t kGradDepth = 256;     // rows of x and d_y between two visits of d_w
inline constexpr std::int64_t kMaxGradPanels = 16;  // of a block
inline constexpr std::int64_t kMaxGradRows = 8 * kMaxTile;
inline constexpr std::int64_t kGradScratch = kGradDepth * (kMaxGradPanels * kPanel + kMaxGradRows);

/// Rows [row_begin, row_end) of d_w (row_begin a multiple of kMaxTile) (at most kMaxGradRows) for
/// up to kMaxGradPanels panels of 16 columns. `scratch`: kGradScratch floats, 64-byte aligned.
void weight_grad_block(const WeightGradJob& job, const LinearBlock& block, float* scratch);

/// Runs all jobs; no two of them may share a d_w.
void run_weight_grad(const ExecCtx& ctx, std::span<const WeightGradJob> jobs);

}  // namespace tandem::gemm
