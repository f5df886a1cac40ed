#include "ops/optim.h"

#include "ops/check_views.h"
#include "ops/op_table.h"

namespace tandem::ops {

void adamw(const ExecCtx& ctx, std::span<float> w, std::span<float> m, std::span<float> v,
           std::span<const float> g, const AdamWParams& params) {
  TDM_CHECK(m.size() == w.size() && v.size() == w.size() && g.size() == w.size(), w.size(),
            m.size(), v.size(), g.size());
  TDM_CHECK(params.step >= 1, params.step);
  TDM_CHECK(ctx.ops->optim.adamw != nullptr);
  const ProfileScope scope(ctx.profiler, "adamw");
  ctx.ops->optim.adamw(ctx, w, m, v, g, params);
}

void muon(const ExecCtx& ctx, F32Mat w, F32Mat momentum, ConstF32Mat g, const MuonParams& params) {
  TDM_CHECK(rows_contiguous(w) && rows_like(momentum, w) && rows_like(g, w), w.size(0), w.size(1));
  TDM_CHECK(ctx.ops->optim.muon != nullptr);
  const ProfileScope scope(ctx.profiler, "muon");
  ctx.ops->optim.muon(ctx, w, momentum, g, params);
}

double sum_squares(const ExecCtx& ctx, std::span<const float> values) {
  TDM_CHECK(ctx.ops->optim.sum_squares != nullptr);
  const ProfileScope scope(ctx.profiler, "sum_squares");
  return ctx.ops->optim.sum_squares(ctx, values);
}

}  // namespace tandem::ops
