// router.cu — sigmoid top-k router.   Contract: ops/moe.h   Oracle: ops/ref/router_ref.h
// Selection one warp, every lane with the ranks of its experts (lane, lane + 32, ...) in registers;
//           a round takes the best of the warp, and its lane looks for the next one. Exact: ranks
//           are compared as ordered integers, ties go to the lower id, a NaN ranks with -inf.
// Traffic   K3: 896 logits in, 896 scores out, 16 ids and weights a token: latency bound.
// Launch    a block a token scores, its first warp selects; graph-safe.
// Numerics  fp32; sums over the chosen experts in slot order, the same in all three ops.
#include <cmath>
#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/families.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/order_key.cuh"
#include "backends/cuda/reduce.cuh"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

/// Three arrays of one word an expert lie in shared memory: 48 KB, what every launch may have.
constexpr std::int64_t kMaxExperts = 4096;
constexpr int kScoreThreads = 256;

struct RouteArgs {
  Mat<std::int32_t> ids;          // [T, A] written by route
  Mat<const std::int32_t> given;  // [T, A] read by route_replay
  Mat<float> weights;             // [T, A]
  Mat<float> scores;              // [T, E]
  Mat<const float> logits;        // [T, E]
  const float* bias;              // [E], route only
  int num_experts;
  int active;
  RouterParams params;
};

__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));  // <= 1: no overflow on either side
  return (x < 0.0F ? e : 1.0F) / (1.0F + e);
}

__device__ __forceinline__ std::uint32_t rank_key(float rank) {
  return order_key(isnan(rank) ? -INFINITY : rank);
}

/// A lane's experts, and the best of them that is left; key 0 when none is.
template <int kPerLane>
struct LaneExperts {
  std::uint32_t keys[kPerLane];
  std::uint32_t top;
  int expert;

  __device__ __forceinline__ LaneExperts(const std::uint32_t* all, int num_experts, int lane) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int e = lane + j * kWarp;
      keys[j] = e < num_experts ? all[e] : 0U;
    }
    find(lane);
  }
  __device__ __forceinline__ void find(int lane) {
    top = 0;
    expert = lane;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      expert = keys[j] > top ? lane + j * kWarp : expert;
      top = max(top, keys[j]);
    }
  }
  __device__ __forceinline__ void take(int chosen, int lane) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      keys[j] = lane + j * kWarp == chosen ? 0U : keys[j];
    }
    find(lane);
  }
};

/// weights[a] = picked[a], renormalised and scaled. `picked` is in shared memory.
__device__ __forceinline__ void weigh(float* weights, const float* picked, int active, int lane,
                                      RouterParams params) {
  float sum = 0.0F;
#pragma unroll 8
  for (int a = 0; a < active; ++a) {
    sum += picked[a];
  }
  const float divisor = params.renormalize ? sum + 1e-20F : 1.0F;
  for (int a = lane; a < active; a += kWarp) {
    weights[a] = picked[a] / divisor * params.scaling_factor;
  }
}

/// The scores of a token's experts, to shared memory and to the output; also(e, score) for each.
template <typename Also>
__device__ __forceinline__ void score_experts(const RouteArgs& args, float* scores,
                                              const Also& also) {
  const float* const logits = args.logits.row(blockIdx.x);
  float* const scores_out = args.scores.row(blockIdx.x);
  for (int e = static_cast<int>(threadIdx.x); e < args.num_experts; e += kScoreThreads) {
    const float score = sigmoid(logits[e]);
    scores[e] = score;
    also(e, score);
    scores_out[e] = score;
  }
  __syncthreads();  // scores of other threads' experts are picked from here on
}

template <int kPerLane>
__global__ void __launch_bounds__(kScoreThreads) route_kernel(const RouteArgs args) {
  extern __shared__ float shared[];
  float* const scores = shared;                                                    // [E]
  auto* const keys = reinterpret_cast<std::uint32_t*>(scores + args.num_experts);  // [E]
  float* const picked = scores + 2 * args.num_experts;                             // [A]
  const std::int64_t t = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  begin_kernel();
  score_experts(args, scores,
                [&](int e, float score) { keys[e] = rank_key(score + args.bias[e]); });
  if (lane >= kWarp) {
    return;
  }
  std::int32_t* const ids = args.ids.row(t);
  LaneExperts<kPerLane> own(keys, args.num_experts, lane);
  for (int a = 0; a < args.active; ++a) {
    const std::uint32_t top = __reduce_max_sync(kFullWarp, own.top);
    const int chosen = __reduce_min_sync(kFullWarp, own.top == top ? own.expert : INT32_MAX);
    if (lane == chosen % kWarp) {
      picked[a] = scores[chosen];
      ids[a] = chosen;
    }
    own.take(chosen, lane);
  }
  __syncwarp();  // every lane's picks are in
  weigh(args.weights.row(t), picked, args.active, lane, args.params);
}

__global__ void __launch_bounds__(kScoreThreads) replay_kernel(const RouteArgs args) {
  begin_kernel();
  extern __shared__ float shared[];
  float* const scores = shared;                     // [E]
  float* const picked = scores + args.num_experts;  // [A]
  const std::int64_t t = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  score_experts(args, scores, [](int, float) {});
  if (lane >= kWarp) {
    return;
  }
  const std::int32_t* const given = args.given.row(t);
  for (int a = lane; a < args.active; a += kWarp) {
    picked[a] = scores[given[a]];
  }
  __syncwarp();  // every lane's picks are in
  weigh(args.weights.row(t), picked, args.active, lane, args.params);
}

struct RouteBwdArgs {
  Mat<float> d_logits;          // [T, E]
  Mat<const float> d_weights;   // [T, A]
  Mat<const std::int32_t> ids;  // [T, A]
  Mat<const float> scores;      // [T, E]
  int num_experts;
  int active;
  RouterParams params;
};

__global__ void __launch_bounds__(kWarp) route_bwd_kernel(const RouteBwdArgs args) {
  begin_kernel();
  extern __shared__ float shared[];
  float* const picked = shared;                // [A] scores
  float* const slopes = picked + args.active;  // [A] d_weights, d_logits
  auto* const ids = reinterpret_cast<std::int32_t*>(slopes + args.active);  // [A]
  const std::int64_t t = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  for (int a = lane; a < args.active; a += kWarp) {
    ids[a] = args.ids.row(t)[a];
    picked[a] = args.scores.row(t)[ids[a]];
    slopes[a] = args.d_weights.row(t)[a];
  }
  __syncwarp();  // the whole token's slots are in
  float sum = 0.0F;
  for (int a = 0; a < args.active; ++a) {
    sum += picked[a];
  }
  const float divisor = args.params.renormalize ? sum + 1e-20F : 1.0F;
  float mean = 0.0F;
  for (int a = 0; a < args.active && args.params.renormalize; ++a) {
    mean += picked[a] / divisor * slopes[a];
  }
  __syncwarp();  // every lane has read the slopes that are replaced below
  for (int a = lane; a < args.active; a += kWarp) {
    const float d_score = (slopes[a] - mean) / divisor * args.params.scaling_factor;
    slopes[a] = d_score * (picked[a] * (1.0F - picked[a]));
  }
  __syncwarp();  // all slopes are in
  // An expert gathers its slots in slot order: no two lanes write one element.
  for (int e = lane; e < args.num_experts; e += kWarp) {
    float total = 0.0F;
    for (int a = 0; a < args.active; ++a) {
      total += ids[a] == e ? slopes[a] : 0.0F;
    }
    args.d_logits.row(t)[e] = total;
  }
}

std::int64_t words(std::int64_t count) {
  return count * 4;
}

void route(const ExecCtx& ctx, I32Mat ids, F32Mat weights, F32Mat scores, ConstF32Mat logits,
           ConstF32Vec bias, RouterParams params) {
  const std::int64_t rows = logits.size(0);
  const std::int64_t experts = logits.size(1);
  TDM_CHECK(experts <= kMaxExperts, experts);
  if (rows == 0) {
    return;
  }
  const RouteArgs args{device_mat(ids),
                       {},
                       device_mat(weights),
                       device_mat(scores),
                       device_mat(logits),
                       bias.data(),
                       checked_cast<int>(experts),
                       checked_cast<int>(ids.size(1)),
                       params};
  const auto kernel = experts <= 2 * kWarp    ? route_kernel<2>
                      : experts <= 8 * kWarp  ? route_kernel<8>
                      : experts <= 32 * kWarp ? route_kernel<32>
                                              : route_kernel<kMaxExperts / kWarp>;
  launch(ctx, "route", kernel,
         {checked_cast<unsigned>(rows), kScoreThreads, words(2 * experts + ids.size(1))}, args);
}

void route_replay(const ExecCtx& ctx, F32Mat weights, F32Mat scores, ConstF32Mat logits,
                  ConstI32Mat ids, RouterParams params) {
  const std::int64_t rows = logits.size(0);
  const std::int64_t experts = logits.size(1);
  TDM_CHECK(experts <= kMaxExperts && ids.size(1) <= kMaxExperts, experts, ids.size(1));
  if (rows == 0) {
    return;
  }
  const RouteArgs args{{},
                       device_mat(ids),
                       device_mat(weights),
                       device_mat(scores),
                       device_mat(logits),
                       nullptr,
                       checked_cast<int>(experts),
                       checked_cast<int>(ids.size(1)),
                       params};
  launch(ctx, "route_replay", replay_kernel,
         {checked_cast<unsigned>(rows), kScoreThreads, words(experts + ids.size(1))}, args);
}

void route_bwd(const ExecCtx& ctx, F32Mat d_logits, ConstF32Mat d_weights, ConstI32Mat ids,
               ConstF32Mat scores, RouterParams params) {
  const std::int64_t rows = scores.size(0);
  TDM_CHECK(ids.size(1) <= kMaxExperts, ids.size(1));
  if (rows == 0) {
    return;
  }
  const RouteBwdArgs args{device_mat(d_logits),
                          device_mat(d_weights),
                          device_mat(ids),
                          device_mat(scores),
                          checked_cast<int>(scores.size(1)),
                          checked_cast<int>(ids.size(1)),
                          params};
  launch(ctx, "route_bwd", route_bwd_kernel,
         {checked_cast<unsigned>(rows), kWarp, words(3 * ids.size(1))}, args);
}

}  // namespace

void add_router_ops(MoeOps& ops) {
  ops.route = route;
  ops.route_replay = route_replay;
  ops.route_bwd = route_bwd;
}

}  // namespace tandem::cuda
