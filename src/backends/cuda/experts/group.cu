// group.cu — (token, slot) pairs grouped by expert.   Contract: experts/group.h
// Math      a stable counting sort of the pairs by their ids: an expert's first row is the number
// of
//           pairs of lower experts, a pair's rank the number of earlier pairs of the same expert.
// Launch    one block an expert, and one for ids that are no expert. Every block reads all ids
// twice
//           (they fit the caches) and needs nothing from another block, so that one launch does.
// Traffic   T*A ids, from L2 mostly; at decode the launch itself is the cost.   Graph-safe.
#include "backends/cuda/device_view.cuh"
#include "backends/cuda/experts/group.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

struct GroupArgs {
  Mat<const std::int32_t> ids;  // [T, A]
  std::int32_t slots;
  std::int32_t pairs;
  std::int32_t num_experts;
  std::int32_t* pair_order;
  std::int32_t* expert_begin;
  std::int32_t* position;

  /// The pair's expert; num_experts when its id is none.
  __device__ std::int32_t expert_of(std::int32_t pair) const {
    const std::int32_t id = ids.row(pair / slots)[pair % slots];
    return id >= 0 && id < num_experts ? id : num_experts;
  }
};

__global__ void __launch_bounds__(kThreads) group_kernel(const GroupArgs args) {
  begin_kernel();
  __shared__ int lower_of_warp[kWarps];
  __shared__ int equal_of_warp[kWarps];
  const int expert = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // A warp's pairs are adjacent, so that warps in rising order see pairs in rising order.
  constexpr std::int64_t kStep = std::int64_t{kWarps} * kWarp;
  const std::int64_t segment = (args.pairs + kStep - 1) / kStep * kWarp;
  const std::int64_t begin = min(warp * segment, std::int64_t{args.pairs});
  const std::int64_t end = min(begin + segment, std::int64_t{args.pairs});

  int lower = 0;
  int equal = 0;
#pragma unroll 4
  for (std::int64_t pair = begin + lane; pair < end; pair += kWarp) {
    const std::int32_t of = args.expert_of(static_cast<std::int32_t>(pair));
    lower += of < expert ? 1 : 0;
    equal += of == expert ? 1 : 0;
  }
  lower = __reduce_add_sync(kFullWarp, lower);
  equal = __reduce_add_sync(kFullWarp, equal);
  if (lane == 0) {
    lower_of_warp[warp] = lower;
    equal_of_warp[warp] = equal;
  }
  __syncthreads();
  int first = 0;  // row of the block's first pair
  int next = 0;   // row of this warp's next pair, counted from there
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    first += lower_of_warp[w];
    next += w < warp ? equal_of_warp[w] : 0;
  }
  next += first;
  if (threadIdx.x == 0) {
    args.expert_begin[expert] = first;
  }
  for (std::int64_t base = begin; base < end; base += kWarp) {
    const std::int64_t pair = base + lane;
    const bool mine = pair < end && args.expert_of(static_cast<std::int32_t>(pair)) == expert;
    const unsigned hits = __ballot_sync(kFullWarp, mine);
    if (mine) {
      const int row = next + __popc(hits & ((1U << lane) - 1U));
      args.pair_order[row] = static_cast<std::int32_t>(pair);
      args.position[pair] = expert < args.num_experts ? row : -1;
    }
    next += __popc(hits);
  }
}

}  // namespace

ExpertGroups group_by_expert(const ExecCtx& ctx, ConstI32Mat ids, std::int64_t num_experts) {
  const std::int64_t pairs = ids.size(0) * ids.size(1);
  TDM_CHECK(pairs <= INT32_MAX && num_experts < INT32_MAX, pairs, num_experts);
  const GroupArgs args{device_mat(ids),
                       static_cast<std::int32_t>(ids.size(1)),
                       static_cast<std::int32_t>(pairs),
                       static_cast<std::int32_t>(num_experts),
                       ctx.workspace->take<std::int32_t>(pairs).data(),
                       ctx.workspace->take<std::int32_t>(num_experts + 1).data(),
                       ctx.workspace->take<std::int32_t>(pairs).data()};
  const auto grid = static_cast<unsigned>(num_experts + 1);
  launch(ctx, "group_by_expert", group_kernel, {grid, kThreads}, args);
  return {args.pair_order, args.expert_begin, args.position};
}

}  // namespace tandem::cuda
