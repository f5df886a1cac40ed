// experts_bwd.cu — the routed experts backward.   Contract: ops/moe.h   Oracle: ops/ref/moe_ref.h
// Math      per pair: d_weight = d_out . out, d_pair = weight d_out; then the transposed products
// of
//           the forward, one weight gradient an expert and matrix, and d_x summed in slot order.
// Numerics  chains as on the CPU; the dot product too: 16 chains, added in halves.
// Launch    16 lanes a pair for the first step; the rest is gemm/exact.h.   Graph-safe.
#include "backends/cuda/device_view.cuh"
#include "backends/cuda/experts/combine.h"
#include "backends/cuda/experts/exact.h"
#include "backends/cuda/gemm/exact.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/reduce.cuh"
#include "ops/op_table.h"
#include "tensor/arena_views.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChains = 16;

struct PairArgs {
  Mat<float> d_weights;  // [T, A]
  Mat<float> d_pair;     // [T*A, DX], by position
  Mat<const float> d_out;
  Mat<const float> out;  // [T*A, DX], by position
  Mat<const float> weights;
  const std::int32_t* position;
  std::int64_t pairs;
  std::int64_t slots;
  std::int64_t dim;
};

__global__ void __launch_bounds__(kThreads) pair_kernel(const PairArgs args) {
  begin_kernel();
  const std::int64_t pair = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kChains;
  const int lane = static_cast<int>(threadIdx.x) % kChains;
  const bool exists = pair < args.pairs;
  const std::int64_t t = exists ? pair / args.slots : 0;
  const std::int64_t a = exists ? pair % args.slots : 0;
  const std::int32_t row = exists ? args.position[pair] : -1;
  float sum = 0.0F;
  if (row >= 0) {
    const float weight = args.weights.row(t)[a];
    const float* d_out = args.d_out.row(t);
    const float* out = args.out.row(row);
    float* d_pair = args.d_pair.row(row);
    for (std::int64_t i = lane; i < args.dim; i += kChains) {
      sum = fmaf(d_out[i], out[i], sum);
      d_pair[i] = fmaf(weight, d_out[i], 0.0F);
    }
  }
  __syncwarp();
#pragma unroll
  for (int half = kChains / 2; half > 0; half /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, half);
  }
  if (exists && lane == 0) {
    args.d_weights.row(t)[a] = sum;
  }
}

void launch_pairs(const ExecCtx& ctx, const PairArgs& args) {
  const std::int64_t threads = args.pairs * kChains;
  const auto grid = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  launch(ctx, "experts_bwd", pair_kernel, {grid, kThreads}, args);
}

}  // namespace

void exact_experts_bwd(const ExecCtx& ctx, F32Mat d_x, F32Mat d_weights, const ExpertGrads& grads,
                       ConstF32Mat d_out, ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights,
                       const ExpertWeights& experts_transposed, const ExpertsSaved& saved,
                       SituParams act) {
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t slots = ids.size(1);
  const std::int64_t pairs = ids.size(0) * slots;
  if (pairs == 0) {
    return;
  }
  const ExpertWeights& transposed = experts_transposed;
  const std::int64_t dim = d_out.size(1);
  const std::int64_t width = saved.gate.size(1);
  const ExpertGroups groups =
      group_by_expert(ctx, ids, static_cast<std::int64_t>(transposed.w1.size()));
  const GroupedRows rows{groups.expert_begin, nullptr, 1, pairs};
  GroupedRows tokens = rows;
  tokens.pairs = groups.pair_order;
  tokens.slots = static_cast<std::int32_t>(slots);

  const F32Mat d_pair = take_mat(*ctx.workspace, pairs, dim);  // gradient of an expert's output
  launch_pairs(ctx, {device_mat(d_weights), device_mat(d_pair), device_mat(d_out),
                     device_mat(ConstF32Mat(saved.out)), device_mat(weights), groups.position,
                     pairs, slots, dim});

  const F32Mat activated = take_mat(*ctx.workspace, pairs, width);
  const F32Mat d_gate = take_mat(*ctx.workspace, pairs, width);
  const F32Mat d_up = take_mat(*ctx.workspace, pairs, width);
  const F32Mat d_pair_x = take_mat(*ctx.workspace, pairs, dim);
  ctx.ops->act.situ(ctx, activated, saved.gate, saved.up, act);
  exact_linear_grouped(ctx, d_up, d_pair, transposed.w2, rows, false);
  ctx.ops->act.situ_bwd(ctx, d_gate, d_up, d_up, saved.gate, saved.up, act);

  exact_weight_grad_grouped(ctx, grads.d_w1, d_gate, x, tokens);
  exact_weight_grad_grouped(ctx, grads.d_w3, d_up, x, tokens);
  exact_weight_grad_grouped(ctx, grads.d_w2, d_pair, activated, rows);

  exact_linear_grouped(ctx, d_pair_x, d_gate, transposed.w1, rows, false);
  exact_linear_grouped(ctx, d_pair_x, d_up, transposed.w3, rows, true);
  combine_slots(ctx, d_x, {}, d_pair_x, groups, slots, nullptr);
}

}  // namespace tandem::cuda
