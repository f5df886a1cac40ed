// combine.cu — rows of pairs back to rows of tokens.   Contract: experts/combine.h
#include "backends/cuda/experts/combine.h"
#include "backends/cuda/experts/combine_rows.cuh"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;

/// The row of a pair grouped by expert.
struct GroupedRow {
  const std::int32_t* position;
  std::int64_t slots;
  __device__ std::int64_t operator()(std::int64_t t, std::int64_t a) const {
    return position[t * slots + a];
  }
};

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

void combine_slots(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, ConstF32Mat rows,
                   const ExpertGroups& groups, std::int64_t slots, const ConstF32Mat* weights) {
  launch_combine(ctx, {out, norm, rows, weights == nullptr ? ConstF32Mat{} : *weights, slots},
                 GroupedRow{groups.position, slots});
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
