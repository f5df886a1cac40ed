// router.cpp — the router wrappers of ops/moe.h.
#include <algorithm>

#include "ops/check_views.h"
#include "ops/moe.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem::ops {
namespace {

bool ids_below(const ExecCtx& ctx, ConstI32Mat ids, std::int64_t limit) {
  if (!ctx.host_reads()) {
    return true;
  }
  for (std::int64_t t = 0; t < ids.size(0); ++t) {
    if (!std::all_of(ids.row(t), ids.row(t) + ids.size(1),
                     [limit](std::int32_t id) { return id >= 0 && id < limit; })) {
      return false;
    }
  }
  return true;
}

}  // namespace

void route(const ExecCtx& ctx, I32Mat ids, F32Mat weights, F32Mat scores, ConstF32Mat logits,
           ConstF32Vec bias, RouterParams params) {
  TDM_CHECK(rows_contiguous(logits) && rows_like(scores, logits), logits.size(0), logits.size(1));
  TDM_CHECK(rows_contiguous(ids) && rows_like(weights, ids) && ids.size(0) == logits.size(0),
            ids.size(0), ids.size(1), weights.size(0), weights.size(1), logits.size(0));
  TDM_CHECK(ids.size(1) >= 1 && ids.size(1) <= logits.size(1), ids.size(1), logits.size(1));
  TDM_CHECK(vec_of(bias, logits.size(1)), bias.size(0), logits.size(1));
  TDM_CHECK(ctx.ops->moe.route != nullptr);
  const ProfileScope scope(ctx.profiler, "route", [&] {
    return elementwise_work(logits, bytes_of(ids, weights, scores, logits, bias));
  });
  ctx.ops->moe.route(ctx, ids, weights, scores, logits, bias, params);
}

void route_replay(const ExecCtx& ctx, F32Mat weights, F32Mat scores, ConstF32Mat logits,
                  ConstI32Mat ids, RouterParams params) {
  TDM_CHECK(rows_contiguous(logits) && rows_like(scores, logits), logits.size(0), logits.size(1));
  TDM_CHECK(rows_contiguous(ids) && rows_like(weights, ids) && ids.size(0) == logits.size(0),
            ids.size(0), ids.size(1), weights.size(0), weights.size(1), logits.size(0));
  TDM_CHECK(ids_below(ctx, ids, logits.size(1)), logits.size(1));
  TDM_CHECK(ctx.ops->moe.route_replay != nullptr);
  const ProfileScope scope(ctx.profiler, "route_replay", [&] {
    return elementwise_work(logits, bytes_of(ids, weights, scores, logits));
  });
  ctx.ops->moe.route_replay(ctx, weights, scores, logits, ids, params);
}

void route_bwd(const ExecCtx& ctx, F32Mat d_logits, ConstF32Mat d_weights, ConstI32Mat ids,
               ConstF32Mat scores, RouterParams params) {
  TDM_CHECK(rows_contiguous(scores) && rows_like(d_logits, scores), scores.size(0), scores.size(1));
  TDM_CHECK(rows_contiguous(ids) && rows_like(d_weights, ids) && ids.size(0) == scores.size(0),
            ids.size(0), ids.size(1), d_weights.size(0), d_weights.size(1), scores.size(0));
  TDM_CHECK(ids_below(ctx, ids, scores.size(1)), scores.size(1));
  TDM_CHECK(ctx.ops->moe.route_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "route_bwd");
  ctx.ops->moe.route_bwd(ctx, d_logits, d_weights, ids, scores, params);
}

}  // namespace tandem::ops
