#include "ops/gemm.h"

#include <algorithm>
#include <vector>

#include "core/checked_cast.h"
#include "ops/op_table.h"
#include "ops/op_work.h"
#include "tensor/arena_views.h"

namespace tandem::ops {
namespace {

void check_linear(F32Mat y, ConstF32Mat x, const PackedWeight& w) {
  TDM_CHECK(x.size(1) == w.in && y.size(1) == w.out && y.size(0) == x.size(0), y.size(0), y.size(1),
            x.size(0), x.size(1), w.out, w.in);
  TDM_CHECK((x.size(1) <= 1 || x.stride(1) == 1) && (y.size(1) <= 1 || y.stride(1) == 1),
            x.stride(1), y.stride(1));
}

double product_flops(std::int64_t rows, const PackedWeight& w) {
  return 2.0 * static_cast<double>(rows) * static_cast<double>(w.out * w.in);
}

OpWork linear_work(F32Mat y, ConstF32Mat x, const PackedWeight& w, bool accumulate) {
  OpWork work;
  work.shape = fmt::format("{} -> {}", shape_of(x), w.out);
  work.bytes = bytes_of(x) + (accumulate ? 2 : 1) * bytes_of(y) + bytes_of(w);
  work.flops = product_flops(x.size(0), w);
  return work;
}

/// An input that several calls share is read once.
OpWork group_work(std::span<const LinearCall> calls) {
  OpWork work;
  std::vector<const float*> inputs;
  for (const LinearCall& call : calls) {
    const OpWork one = linear_work(call.y, call.x, *call.w, false);
    const bool shared = std::ranges::find(inputs, call.x.data()) != inputs.end();
    work.shape += inputs.empty() ? one.shape : fmt::format("+{}", call.w->out);
    work.bytes += one.bytes - (shared ? bytes_of(call.x) : 0.0);
    work.flops += one.flops;
    if (call.up != nullptr) {
      work.shape += fmt::format(" x {}", call.up->out);
      work.bytes += bytes_of(*call.up);
      work.flops += one.flops;
    }
    inputs.push_back(call.x.data());
  }
  return work;
}

OpWork sum_work(F32Mat y, ConstF32Mat base, std::span<const LinearTerm> terms) {
  OpWork work;
  work.bytes = bytes_of(base) + bytes_of(y);
  for (const LinearTerm& term : terms) {
    const OpWork one = linear_work({}, term.x, *term.w, false);
    work.shape += work.shape.empty() ? shape_of(term.x) : fmt::format(" + {}", term.x.size(1));
    work.bytes += one.bytes;
    work.flops += one.flops;
  }
  work.shape += fmt::format(" -> {}", y.size(1));
  return work;
}

OpWork heads_work(F32Cube y, ConstF32Cube x, std::span<const PackedWeight> w) {
  OpWork work;
  work.shape = fmt::format("{} -> {}", shape_of(x), y.size(2));
  work.bytes = bytes_of(x) + bytes_of(y);
  for (const PackedWeight& head : w) {
    work.bytes += bytes_of(head);
    work.flops += product_flops(x.size(0), head);
  }
  return work;
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
  const ProfileScope scope(ctx.profiler, "linear",
                           [&] { return linear_work(y, x, w, accumulate); });
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
  const ProfileScope scope(ctx.profiler, "linear_group", [&] { return group_work(calls); });
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
  const ProfileScope scope(ctx.profiler, "linear_sum", [&] { return sum_work(y, base, terms); });
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
  const ProfileScope scope(ctx.profiler, "linear_heads", [&] { return heads_work(y, x, w); });
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
