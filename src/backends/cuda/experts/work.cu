// work.cu — work items of the experts' kernels, and the sum of their rows.
// Contract  experts/work.cuh
// Traffic   items: E + 1 counts, 12 bytes an item. The sum: combine_rows.cuh.
// Launch    items: one CTA, a thread an expert. Graph-safe.
#include <algorithm>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/experts/combine_rows.cuh"
#include "backends/cuda/experts/experts_launch.cuh"
#include "backends/cuda/experts/group.h"
#include "backends/cuda/experts/work.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {
namespace {

constexpr int kItemThreads = kMaxExperts;

/// The sum of `value` over the threads before this one, and over all.
struct Prefix {
  int before;
  int total;
};
__device__ __forceinline__ Prefix block_prefix(int value) {
  constexpr int kWarps = kItemThreads / kWarp;
  __shared__ int warp_totals[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int sum = warp_running_sum(value);
  if (lane == kWarp - 1) {
    warp_totals[warp] = sum;
  }
  __syncthreads();  // every warp's total is there
  int before_warps = 0;
  int total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    before_warps += i < warp ? warp_totals[i] : 0;
    total += warp_totals[i];
  }
  return {before_warps + sum - value, total};
}

__global__ void __launch_bounds__(kItemThreads)
    cut_items(ExpertItem* items, std::int32_t* filled, int num_items,
              const std::int32_t* expert_begin, int num_experts, int chunk) {
  begin_kernel();
  const int expert = static_cast<int>(threadIdx.x);
  const int begin = expert < num_experts ? expert_begin[expert] : 0;
  const int count = expert < num_experts ? expert_begin[expert + 1] - begin : 0;
  const Prefix place = block_prefix((count + chunk - 1) / chunk);
  if (expert == 0) {
    *filled = place.total;
  }
  for (int done = 0, i = place.before; done < count; done += chunk, ++i) {
    items[i] = {expert, begin + done, min(chunk, count - done)};
  }
  for (int i = place.total + expert; i < num_items; i += kItemThreads) {
    items[i] = {-1, 0, 0};
  }
}

/// The row of a pair in order of pairs; a pair whose id is no expert has none that was written.
struct PairRow {
  Mat<const std::int32_t> ids;
  std::int64_t slots;
  std::int32_t num_experts;
  __device__ std::int64_t operator()(std::int64_t t, std::int64_t a) const {
    const std::int32_t id = ids.row(t)[a];
    return id >= 0 && id < num_experts ? t * slots + a : -1;
  }
};

}  // namespace

ExpertWork expert_work(const ExecCtx& ctx, ConstI32Mat ids, std::int64_t num_experts,
                       const ExpertsConfig& config) {
  const auto experts = static_cast<std::int32_t>(num_experts);
  if (ids.size(0) == 1) {
    return {nullptr, ids.data(), nullptr, experts, static_cast<std::int32_t>(ids.size(1)), nullptr};
  }
  const ExpertGroups groups = group_by_expert(ctx, ids, num_experts);
  auto* items = ctx.workspace->take<ExpertItem>(config.items).data();
  auto* filled = ctx.workspace->take<std::int32_t>(1).data();
  launch(ctx, "experts", cut_items, {1, kItemThreads}, items, filled,
         static_cast<int>(config.items), groups.expert_begin, experts, config.chunk);
  return {items, nullptr, groups.pair_order, experts, static_cast<std::int32_t>(ids.size(1)),
          filled};
}

void combine_pairs(const ExecCtx& ctx, const CombineSlots& args) {
  const std::int64_t slots = args.ids.size(1);
  launch_combine(ctx, {args.out, args.norm, args.y, args.weights, slots},
                 PairRow{device_mat(args.ids), slots, static_cast<std::int32_t>(args.num_experts)});
}

}  // namespace tandem::cuda
