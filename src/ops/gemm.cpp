#include "ops/gemm.h"

#include "core/checked_cast.h"
#include "ops/op_table.h"

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
  }
  TDM_CHECK(ctx.ops->gemm.linear_group != nullptr);
  const ProfileScope scope(ctx.profiler, "linear_group");
  ctx.ops->gemm.linear_group(ctx, calls);
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
