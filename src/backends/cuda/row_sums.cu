// row_sums.cu — column sums of partial results, for gradients of parameters.
// Traffic   each partial once, and 1/64 of them again.
// Numerics  fp32; groups of 64 rows in order, then the groups in order, and so on.
// Launch    a thread a column and group; graph-safe.
#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/row_sums.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kGroupRows = 64;
constexpr std::int64_t kMaxGridY = 65535;

/// Row g of `out` is the sum of group g, or is increased by it.
template <bool kAccumulate>
__global__ void __launch_bounds__(kThreads)
    sum_groups(float* out, const float* rows, std::int64_t num_rows, std::int64_t width) {
  begin_kernel();
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (col >= width) {
    return;
  }
  const std::int64_t groups = (num_rows + kGroupRows - 1) / kGroupRows;
  for (std::int64_t g = blockIdx.y; g < groups; g += gridDim.y) {
    const std::int64_t end = min((g + 1) * kGroupRows, num_rows);
    float sum = 0.0F;
#pragma unroll 8
    for (std::int64_t r = g * kGroupRows; r < end; ++r) {
      sum += rows[r * width + col];
    }
    float* const to = out + g * width + col;
    *to = kAccumulate ? *to + sum : sum;
  }
}

template <bool kAccumulate>
void launch_groups(const ExecCtx& ctx, const char* op, float* out, const float* rows,
                   std::int64_t num_rows, std::int64_t width) {
  const std::int64_t groups = (num_rows + kGroupRows - 1) / kGroupRows;
  const dim3 grid(static_cast<unsigned>((width + kThreads - 1) / kThreads),
                  static_cast<unsigned>(std::min(groups, kMaxGridY)));
  launch(ctx, op, sum_groups<kAccumulate>, {grid, kThreads}, out, rows, num_rows, width);
}

struct Partials {
  const float* rows;
  std::int64_t count;
};

/// At most kGroupRows rows with the same sum.
Partials shrink(const ExecCtx& ctx, const char* op, Partials from, std::int64_t width) {
  while (from.count > kGroupRows) {
    const std::int64_t groups = (from.count + kGroupRows - 1) / kGroupRows;
    float* const sums = ctx.workspace->take<float>(groups * width).data();
    launch_groups<false>(ctx, op, sums, from.rows, from.count, width);
    from = {sums, groups};
  }
  return from;
}

}  // namespace

void add_row_sum(const ExecCtx& ctx, const char* op, float* into, const float* rows,
                 std::int64_t num_rows, std::int64_t width) {
  if (num_rows == 0 || width == 0) {
    return;
  }
  const Partials last = shrink(ctx, op, {rows, num_rows}, width);
  launch_groups<true>(ctx, op, into, last.rows, last.count, width);
}

const float* row_sum(const ExecCtx& ctx, const char* op, const float* rows, std::int64_t num_rows,
                     std::int64_t width) {
  const Partials last = shrink(ctx, op, {rows, num_rows}, width);
  float* const sum = ctx.workspace->take<float>(width).data();
  launch_groups<false>(ctx, op, sum, last.rows, last.count, width);
  return sum;
}

}  // namespace tandem::cuda
