#include "ops/moe.h"

#include "core/checked_cast.h"
#include "ops/check_views.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem::ops {
namespace {

/// All experts of one shape: w1, w3 [F, DX] and w2 [DX, F].
void check_experts(const ExpertWeights& experts, std::int64_t width, std::int64_t dim) {
  TDM_CHECK(!experts.w1.empty() && experts.w1.size() == experts.w3.size() &&
                experts.w1.size() == experts.w2.size(),
            experts.w1.size(), experts.w3.size(), experts.w2.size());
  for (std::size_t e = 0; e < experts.w1.size(); ++e) {
    TDM_CHECK(experts.w1[e].out == width && experts.w1[e].in == dim, e, experts.w1[e].out,
              experts.w1[e].in, width, dim);
    TDM_CHECK(experts.w3[e].out == width && experts.w3[e].in == dim, e, experts.w3[e].out,
              experts.w3[e].in, width, dim);
    TDM_CHECK(experts.w2[e].out == dim && experts.w2[e].in == width, e, experts.w2[e].out,
              experts.w2[e].in, width, dim);
  }
}

void check_routing(ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights) {
  TDM_CHECK(
      ids.size(0) == x.size(0) && weights.size(0) == x.size(0) && ids.size(1) == weights.size(1),
      x.size(0), ids.size(0), weights.size(0), ids.size(1), weights.size(1));
  TDM_CHECK(x.size(1) <= 1 || x.stride(1) == 1, x.stride(1));
  TDM_CHECK(ids.size(1) <= 1 || (ids.stride(1) == 1 && weights.stride(1) == 1), ids.stride(1),
            weights.stride(1));
}

void check_saved(const ExpertsSaved& saved, std::int64_t tokens, std::int64_t slots,
                 std::int64_t width, std::int64_t dim) {
  const std::int64_t pairs = tokens * slots;
  TDM_CHECK(saved.gate.size(0) == pairs && saved.gate.size(1) == width, saved.gate.size(0),
            saved.gate.size(1), pairs, width);
  TDM_CHECK(saved.up.size(0) == pairs && saved.up.size(1) == width, saved.up.size(0),
            saved.up.size(1), pairs, width);
  TDM_CHECK(saved.out.size(0) == pairs && saved.out.size(1) == dim, saved.out.size(0),
            saved.out.size(1), pairs, dim);
  TDM_CHECK(saved.pair_of_slot.size(0) == tokens && saved.pair_of_slot.size(1) == slots,
            saved.pair_of_slot.size(0), saved.pair_of_slot.size(1), tokens, slots);
}

void check_grads(std::span<const F32Mat> grads, std::size_t num_experts, std::int64_t rows,
                 std::int64_t cols) {
  TDM_CHECK(grads.size() == num_experts, grads.size(), num_experts);
  for (const F32Mat& grad : grads) {
    TDM_CHECK(grad.size(0) == rows && grad.size(1) == cols, grad.size(0), grad.size(1), rows, cols);
  }
}

OpWork experts_work(F32Mat out, const RowNorm& norm, ConstF32Mat x, ConstI32Mat ids,
                    ConstF32Mat weights, const ExpertWeights& experts) {
  const PackedWeight& gate = experts.w1[0];
  OpWork work;
  work.shape =
      fmt::format("{} -> {}, {} of {}", shape_of(x), gate.out, ids.size(1), experts.w1.size());
  work.bytes = bytes_of(out, norm.y, norm.w, x, ids, weights);
  work.bytes_per_expert = bytes_of(gate) + bytes_of(experts.w3[0]) + bytes_of(experts.w2[0]);
  work.flops = 6.0 * static_cast<double>(ids.numel()) * static_cast<double>(gate.out * gate.in);
  return work;
}

}  // namespace

void experts(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, const ExpertsSaved* saved,
             ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights, const ExpertWeights& experts,
             SituParams act) {
  check_routing(x, ids, weights);
  TDM_CHECK(!experts.w1.empty());
  const std::int64_t width = experts.w1[0].out;
  check_experts(experts, width, x.size(1));
  const bool only_normed = norm.wanted() && out.size(1) == 0;
  TDM_CHECK(only_normed || rows_like(out, x), out.size(0), out.size(1), x.size(0), x.size(1));
  TDM_CHECK(!norm.wanted() || (rows_like(norm.y, x) && vec_of(norm.w, x.size(1))), norm.y.size(0),
            norm.y.size(1), norm.w.size(0), x.size(0), x.size(1));
  if (saved != nullptr) {
    check_saved(*saved, x.size(0), ids.size(1), width, x.size(1));
  }
  TDM_CHECK(ctx.ops->moe.experts != nullptr && ctx.ops->act.situ != nullptr);
  TDM_CHECK(!norm.wanted() || ctx.ops->norm.rms_norm != nullptr);
  const ProfileScope scope(ctx.profiler, "experts",
                           [&] { return experts_work(out, norm, x, ids, weights, experts); });
  ctx.ops->moe.experts(ctx, out, norm, saved, x, ids, weights, experts, act);
}

void experts_bwd(const ExecCtx& ctx, F32Mat d_x, F32Mat d_weights, const ExpertGrads& grads,
                 ConstF32Mat d_out, ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights,
                 const ExpertWeights& experts_transposed, const ExpertsSaved& saved,
                 SituParams act) {
  check_routing(x, ids, weights);
  const std::int64_t dim = x.size(1);
  const std::int64_t width = saved.gate.size(1);
  const ExpertWeights& t = experts_transposed;
  TDM_CHECK(!t.w1.empty() && t.w1.size() == t.w2.size() && t.w1.size() == t.w3.size());
  for (std::size_t e = 0; e < t.w1.size(); ++e) {
    TDM_CHECK(t.w1[e].out == dim && t.w1[e].in == width && t.w3[e].out == dim &&
                  t.w3[e].in == width && t.w2[e].out == width && t.w2[e].in == dim,
              e, dim, width);
  }
  check_saved(saved, x.size(0), ids.size(1), width, dim);
  check_grads(grads.d_w1, t.w1.size(), width, dim);
  check_grads(grads.d_w3, t.w1.size(), width, dim);
  check_grads(grads.d_w2, t.w1.size(), dim, width);
  TDM_CHECK(
      d_out.size(0) == x.size(0) && d_out.size(1) == dim && d_x.size(0) == x.size(0) &&
          d_x.size(1) == dim && d_weights.size(0) == x.size(0) && d_weights.size(1) == ids.size(1),
      d_out.size(0), d_out.size(1), d_x.size(0), d_x.size(1), d_weights.size(0), d_weights.size(1));
  TDM_CHECK(ctx.ops->moe.experts_bwd != nullptr && ctx.ops->act.situ != nullptr &&
            ctx.ops->act.situ_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "experts_bwd");
  ctx.ops->moe.experts_bwd(ctx, d_x, d_weights, grads, d_out, x, ids, weights, experts_transposed,
                           saved, act);
}

}  // namespace tandem::ops
