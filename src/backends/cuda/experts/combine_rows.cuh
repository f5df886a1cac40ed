// combine_rows.cuh — rows of pairs back to rows of tokens, however a pair's row is found.
// Traffic   every row of a pair once; memory bound.   Numerics  one fp32 chain in slot order.
// Launch    one thread an element of a token's row, grid-stride over tokens; graph-safe.
#pragma once

#include <algorithm>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/launch.cuh"

namespace tandem::cuda {

inline constexpr int kCombineThreads = 256;

struct CombineArgs {
  Mat<float> out;            // [T, D]
  Mat<const float> rows;     // a pair's row, [.., D]
  Mat<const float> weights;  // [T, A]; data null: all 1
  std::int64_t tokens;
  std::int64_t cols;
  std::int64_t slots;
};

/// out[t] = the chain fma(weights[t, a], rows[row_of(t, a)], sum) over slots a from 0; pairs whose
/// row is below 0 are left out.
template <typename RowOf>
__global__ void __launch_bounds__(kCombineThreads)
    combine_rows(const CombineArgs args, const RowOf row_of) {
  begin_kernel();
  const std::int64_t col = std::int64_t{blockIdx.x} * kCombineThreads + threadIdx.x;
  if (col >= args.cols) {
    return;
  }
  for (std::int64_t t = blockIdx.y; t < args.tokens; t += gridDim.y) {
    float sum = 0.0F;
#pragma unroll 4
    for (std::int64_t a = 0; a < args.slots; ++a) {
      const std::int64_t row = row_of(t, a);
      if (row >= 0) {
        const float weight = args.weights.data == nullptr ? 1.0F : args.weights.row(t)[a];
        sum = fmaf(weight, args.rows.row(row)[col], sum);
      }
    }
    args.out.row(t)[col] = sum;
  }
}

template <typename RowOf>
void launch_combine(const ExecCtx& ctx, const CombineArgs& args, const RowOf& row_of) {
  if (args.tokens == 0 || args.cols == 0) {
    return;
  }
  const dim3 grid(static_cast<unsigned>((args.cols + kCombineThreads - 1) / kCombineThreads),
                  static_cast<unsigned>(std::min<std::int64_t>(args.tokens, 65535)));
  launch(ctx, "combine_slots", combine_rows<RowOf>, {grid, kCombineThreads}, args, row_of);
}

}  // namespace tandem::cuda
