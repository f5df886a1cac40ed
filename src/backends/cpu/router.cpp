// router.cpp — sigmoid top-k router. Contract: ops/moe.h. Oracle: ops/ref/router_ref.h.
//
// Scores are vectorised; the A best are kept in a sorted list while scanning experts in order of
// id, so that a later expert enters only with a strictly larger value: ties go to the lower id. A
// NaN ranks below everything (its score and weight stay NaN).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/router.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cpu/families.h"
#include "backends/cpu/row_blocks.h"
#include "backends/cpu/simd_loops-inl.h"
#include "backends/cpu/simd_math-inl.h"
#include "core/checked_cast.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr double kNsPerExpert = 2.0;

HWY_INLINE void score_row(float* scores, const float* logits, std::size_t n) {
  for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
    part.store(vsigmoid(FloatTag(), part.load(logits + i)), scores + i);
  });
}

/// weights[a] = scores[ids[a]], renormalised and scaled; sums in slot order.
void weigh_row(float* weights, const float* scores, const std::int32_t* ids, std::int64_t active,
               RouterParams params) {
  float sum = 0;
  for (std::int64_t a = 0; a < active; ++a) {
    weights[a] = scores[ids[a]];
    sum += weights[a];
  }
  const float divisor = params.renormalize ? sum + 1e-20F : 1.0F;
  for (std::int64_t a = 0; a < active; ++a) {
    weights[a] = weights[a] / divisor * params.scaling_factor;
  }
}

/// The `active` largest of scores + bias; `ranks` [active] is scratch.
void select_row(std::int32_t* ids, float* ranks, const float* scores, const float* bias,
                std::int64_t num_experts, std::int64_t active) {
  std::int64_t held = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const float sum = scores[e] + bias[e];
    const float rank = std::isnan(sum) ? -std::numeric_limits<float>::infinity() : sum;
    if (held == active && !(rank > ranks[active - 1])) {
      continue;
    }
    std::int64_t at = held < active ? held++ : active - 1;
    for (; at > 0 && rank > ranks[at - 1]; --at) {
      ranks[at] = ranks[at - 1];
      ids[at] = ids[at - 1];
    }
    ranks[at] = rank;
    ids[at] = static_cast<std::int32_t>(e);
  }
}

RowBlocks token_blocks(ConstF32Mat logits) {
  return row_blocks(logits.size(0), kNsPerExpert * static_cast<double>(logits.size(1)));
}

void route(const ExecCtx& ctx, I32Mat ids, F32Mat weights, F32Mat scores, ConstF32Mat logits,
           ConstF32Vec bias, RouterParams params) {
  const std::int64_t num_experts = logits.size(1);
  parallel_rows(ctx, token_blocks(logits),
                [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
                  for (std::int64_t t = begin; t < end; ++t) {
                    score_row(scores.row(t), logits.row(t), usize(num_experts));
                    // The weights' own row holds the ranks until the ids are known.
                    select_row(ids.row(t), weights.row(t), scores.row(t), bias.data(), num_experts,
                               ids.size(1));
                    weigh_row(weights.row(t), scores.row(t), ids.row(t), ids.size(1), params);
                  }
                });
}

void route_replay(const ExecCtx& ctx, F32Mat weights, F32Mat scores, ConstF32Mat logits,
                  ConstI32Mat ids, RouterParams params) {
  parallel_rows(ctx, token_blocks(logits),
                [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
                  for (std::int64_t t = begin; t < end; ++t) {
                    score_row(scores.row(t), logits.row(t), usize(logits.size(1)));
                    weigh_row(weights.row(t), scores.row(t), ids.row(t), ids.size(1), params);
                  }
                });
}

void route_bwd_row(float* d_logits, const float* d_weights, const std::int32_t* ids,
                   const float* scores, std::int64_t active, RouterParams params) {
  float sum = 0;
  for (std::int64_t a = 0; a < active; ++a) {
    sum += scores[ids[a]];
  }
  const float divisor = params.renormalize ? sum + 1e-20F : 1.0F;
  float mean = 0;
  for (std::int64_t a = 0; a < active && params.renormalize; ++a) {
    mean += scores[ids[a]] / divisor * d_weights[a];
  }
  for (std::int64_t a = 0; a < active; ++a) {
    const float s = scores[ids[a]];
    const float d_score = (d_weights[a] - mean) / divisor * params.scaling_factor;
    d_logits[ids[a]] += d_score * (s * (1.0F - s));
  }
}

void route_bwd(const ExecCtx& ctx, F32Mat d_logits, ConstF32Mat d_weights, ConstI32Mat ids,
               ConstF32Mat scores, RouterParams params) {
  parallel_rows(ctx, token_blocks(scores),
                [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
                  for (std::int64_t t = begin; t < end; ++t) {
                    std::fill_n(d_logits.row(t), d_logits.size(1), 0.0F);
                    route_bwd_row(d_logits.row(t), d_weights.row(t), ids.row(t), scores.row(t),
                                  ids.size(1), params);
                  }
                });
}

/// Only the router's entries; the experts fill in theirs.
MoeOps router_ops() {
  MoeOps ops{};
  ops.route = route;
  ops.route_replay = route_replay;
  ops.route_bwd = route_bwd;
  return ops;
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(router_ops);
void cpu_add_router_ops(MoeOps& ops) {
  const MoeOps router = HWY_DYNAMIC_DISPATCH(router_ops)();
  ops.route = router.route;
  ops.route_replay = router.route_replay;
  ops.route_bwd = router.route_bwd;
}

}  // namespace tandem
#endif  // HWY_ONCE
