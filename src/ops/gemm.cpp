#include "ops/gemm.h"

#include <vector>

#include "core/checked_cast.h"
#include "ops/op_table.h"
#include "tensor/arena_views.h"

namespace tandem::ops {
namespace {

void check_linear(F32Mat y, ConstF32Mat x, const PackedWeight& w) {
  TDM_CHECK(x.size(1) == w.in && y.size(1) == w.out && y.size(0) == x.size(0), y.size(0), y.size(1),
            x.size(0), x.size(1), w.out, w.in);
  TDM_CHECK((x.size(1) <= 1 || x.stride(1) == 1) && (y.size(1) <= 1 || y.stride(1) == 1),
            x.stride(1), y.stride(1));
}

}  // namespace

void pack(const ExecCtx& ctx, PackedWeight& packed, const WeightRef& weight,
          Orientation orientation) {
  TDM_CHECK(ctx.ops->gemm.pack != nullptr);
  const ProfileScope scope(ctx.profiler, "pack");
  ctx.ops->gemm.pack(ctx, packed, weight, orientation);
}

void linear(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w, bool accumulate) {
  check_linear(y, x, w);
  TDM_CHECK(ctx.ops->gemm.linear != nullptr);
  const ProfileScope scope(ctx.profiler, "linear");
  ctx.ops->gemm.linear(ctx, y, x, w, accumulate);
}

void linear_group(const ExecCtx& ctx, std::span<const LinearCall> calls) {
  for (const LinearCall& call : calls) {
    TDM_CHECK(call.w != nullptr);
    check_linear(call.y, call.x, *call.w);
    TDM_CHECK(call.up == nullptr || (call.up->out == call.w->out && call.up->in == call.w->in &&
                                     call.up->format == call.w->format));
  }
  TDM_CHECK(ctx.ops->gemm.linear_group != nullptr);
  const ProfileScope scope(ctx.profiler, "linear_group");
  ctx.ops->gemm.linear_group(ctx, calls);
}

void linear_group_in_steps(const ExecCtx& ctx, std::span<const LinearCall> calls,
                           void (*plain)(const ExecCtx&, std::span<const LinearCall>)) {
  const ArenaScope scope(*ctx.workspace);
  std::vector<LinearCall> products;
  std::vector<F32Mat> ups;
  for (const LinearCall& call : calls) {
    products.push_back({call.y, call.x, call.w});
    if (call.up != nullptr) {
      ups.push_back(take_mat(*ctx.workspace, call.y.size(0), call.y.size(1)));
      products.push_back({ups.back(), call.x, call.up});
    }
  }
  plain(ctx, products);
  auto up = ups.begin();
  for (const LinearCall& call : calls) {
    if (call.up != nullptr) {
      ctx.ops->act.situ(ctx, call.y, call.y, *up++, call.act);
    }
  }
}

void linear_sum(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, std::span<const LinearTerm> terms) {
  TDM_CHECK(!terms.empty() && (base.empty() || base.shape() == y.shape()));
  for (const LinearTerm& term : terms) {
    TDM_CHECK(term.w != nullptr);
    check_linear(y, term.x, *term.w);
  }
  TDM_CHECK(ctx.ops->gemm.linear_sum != nullptr);
  const ProfileScope scope(ctx.profiler, "linear_sum");
  ctx.ops->gemm.linear_sum(ctx, y, base, terms);
}

void linear_sum_in_steps(const ExecCtx& ctx, F32Mat y, ConstF32Mat base,
                         std::span<const LinearTerm> terms) {
  if (base.empty()) {
    ctx.ops->gemm.linear(ctx, y, terms.front().x, *terms.front().w, false);
    base = y;
    terms = terms.subspan(1);
  }
  for (const LinearTerm& term : terms) {
    const ArenaScope scope(*ctx.workspace);
    const F32Mat product = take_mat(*ctx.workspace, y.size(0), y.size(1));
    ctx.ops->gemm.linear(ctx, product, term.x, *term.w, false);
    ctx.ops->act.add(ctx, y, base, product);
    base = y;
  }
}

void linear_heads(const ExecCtx& ctx, F32Cube y, ConstF32Cube x, std::span<const PackedWeight> w,
                  bool accumulate) {
  TDM_CHECK(y.size(0) == x.size(0) && y.size(1) == isize(w) && x.size(1) == isize(w), y.size(0),
            x.size(0), y.size(1), x.size(1), w.size());
  TDM_CHECK((x.size(2) <= 1 || x.stride(2) == 1) && (y.size(2) <= 1 || y.stride(2) == 1),
            x.stride(2), y.stride(2));
  for (const PackedWeight& head : w) {
    TDM_CHECK(head.in == x.size(2) && head.out == y.size(2), head.out, head.in, y.size(2),
              x.size(2));
  }
  TDM_CHECK(ctx.ops->gemm.linear_heads != nullptr);
  const ProfileScope scope(ctx.profiler, "linear_heads");
  ctx.ops->gemm.linear_heads(ctx, y, x, w, accumulate);
}

void weight_grad(const ExecCtx& ctx, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x) {
  TDM_CHECK(d_y.size(0) == x.size(0) && d_w.size(0) == d_y.size(1) && d_w.size(1) == x.size(1),
            d_w.size(0), d_w.size(1), d_y.size(0), d_y.size(1), x.size(0), x.size(1));
  TDM_CHECK((x.size(1) <= 1 || x.stride(1) == 1) && (d_y.size(1) <= 1 || d_y.stride(1) == 1) &&
                (d_w.size(1) <= 1 || d_w.stride(1) == 1),
            x.stride(1), d_y.stride(1), d_w.stride(1));
  TDM_CHECK(ctx.ops->gemm.weight_grad != nullptr);
  const ProfileScope scope(ctx.profiler, "weight_grad");
  ctx.ops->gemm.weight_grad(ctx, d_w, d_y, x);
}

}  // namespace tandem::ops
