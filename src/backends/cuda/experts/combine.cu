// combine.cu — rows of pairs back to rows of tokens.   Contract: experts/combine.h
// Traffic   every row of a pair once; memory bound.   Numerics  one fp32 chain in slot order.
// Launch    one thread an element of a token's row, grid-stride over tokens; graph-safe.
#include <algorithm>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/experts/combine.h"
#include "backends/cuda/launch.cuh"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;

struct CombineArgs {
  Mat<float> out;
  Mat<const float> rows;
  Mat<const float> weights;  // data null: all 1
  const std::int32_t* position;
  std::int64_t tokens;
  std::int64_t cols;
  std::int64_t slots;
};

__global__ void __launch_bounds__(kThreads) combine_kernel(const CombineArgs args) {
  begin_kernel();
  const std::int64_t col = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (col >= args.cols) {
    return;
  }
  for (std::int64_t t = blockIdx.y; t < args.tokens; t += gridDim.y) {
    float sum = 0.0F;
#pragma unroll 4
    for (std::int64_t a = 0; a < args.slots; ++a) {
      const std::int32_t row = args.position[t * args.slots + a];
      if (row >= 0) {
        const float weight = args.weights.data == nullptr ? 1.0F : args.weights.row(t)[a];
        sum = fmaf(weight, args.rows.row(row)[col], sum);
      }
    }
    args.out.row(t)[col] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    save_positions_kernel(const Mat<std::int32_t> to, const std::int32_t* position,
                          std::int64_t slots, std::int64_t pairs) {
  begin_kernel();
  const std::int64_t pair = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (pair < pairs) {
    to.row(pair / slots)[pair % slots] = position[pair];
  }
}

}  // namespace

void combine_slots(const ExecCtx& ctx, F32Mat out, ConstF32Mat rows, const ExpertGroups& groups,
                   std::int64_t slots, const ConstF32Mat* weights) {
  if (out.size(0) == 0 || out.size(1) == 0) {
    return;
  }
  const CombineArgs args{device_mat(out),
                         device_mat(rows),
                         weights == nullptr ? Mat<const float>{nullptr, 0} : device_mat(*weights),
                         groups.position,
                         out.size(0),
                         out.size(1),
                         slots};
  const dim3 grid(static_cast<unsigned>((out.size(1) + kThreads - 1) / kThreads),
                  static_cast<unsigned>(std::min<std::int64_t>(out.size(0), 65535)));
  launch(ctx, "combine_slots", combine_kernel, {grid, kThreads}, args);
}

void save_positions(const ExecCtx& ctx, I32Mat pair_of_slot, const ExpertGroups& groups) {
  const std::int64_t pairs = pair_of_slot.size(0) * pair_of_slot.size(1);
  if (pairs == 0) {
    return;
  }
  const auto grid = static_cast<unsigned>((pairs + kThreads - 1) / kThreads);
  launch(ctx, "save_positions", save_positions_kernel, {grid, kThreads}, device_mat(pair_of_slot),
         groups.position, pair_of_slot.size(1), pairs);
}

}  // namespace tandem::cuda
