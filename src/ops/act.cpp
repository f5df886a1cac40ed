#include "ops/act.h"

#include "ops/check_views.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem::ops {

void situ(const ExecCtx& ctx, F32Mat y, ConstF32Mat gate, ConstF32Mat up, SituParams params) {
  TDM_CHECK(rows_contiguous(gate) && rows_like(up, gate) && rows_like(y, gate), gate.size(0),
            gate.size(1), up.size(0), up.size(1), y.size(0), y.size(1));
  TDM_CHECK(params.beta > 0, params.beta);
  TDM_CHECK(ctx.ops->act.situ != nullptr);
  const ProfileScope scope(ctx.profiler, "situ",
                           [&] { return elementwise_work(y, bytes_of(y, gate, up)); });
  ctx.ops->act.situ(ctx, y, gate, up, params);
}

void situ_bwd(const ExecCtx& ctx, F32Mat d_gate, F32Mat d_up, ConstF32Mat d_y, ConstF32Mat gate,
              ConstF32Mat up, SituParams params) {
  TDM_CHECK(rows_contiguous(gate) && rows_like(up, gate) && rows_like(d_y, gate) &&
                rows_like(d_gate, gate) && rows_like(d_up, gate),
            gate.size(0), gate.size(1));
  TDM_CHECK(params.beta > 0, params.beta);
  TDM_CHECK(ctx.ops->act.situ_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "situ_bwd");
  ctx.ops->act.situ_bwd(ctx, d_gate, d_up, d_y, gate, up, params);
}

void sigmoid_gate(const ExecCtx& ctx, F32Mat y, ConstF32Mat o, ConstF32Mat gate) {
  TDM_CHECK(rows_contiguous(o) && rows_like(gate, o) && rows_like(y, o), o.size(0), o.size(1));
  TDM_CHECK(ctx.ops->act.sigmoid_gate != nullptr);
  const ProfileScope scope(ctx.profiler, "sigmoid_gate",
                           [&] { return elementwise_work(y, bytes_of(y, o, gate)); });
  ctx.ops->act.sigmoid_gate(ctx, y, o, gate);
}

void sigmoid_gate_bwd(const ExecCtx& ctx, F32Mat d_o, F32Mat d_gate, ConstF32Mat d_y, ConstF32Mat o,
                      ConstF32Mat gate) {
  TDM_CHECK(rows_contiguous(o) && rows_like(gate, o) && rows_like(d_y, o) && rows_like(d_o, o) &&
                rows_like(d_gate, o),
            o.size(0), o.size(1));
  TDM_CHECK(ctx.ops->act.sigmoid_gate_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "sigmoid_gate_bwd");
  ctx.ops->act.sigmoid_gate_bwd(ctx, d_o, d_gate, d_y, o, gate);
}

void add(const ExecCtx& ctx, F32Mat y, ConstF32Mat a, ConstF32Mat b) {
  TDM_CHECK(rows_contiguous(a) && rows_like(b, a) && rows_like(y, a), a.size(0), a.size(1),
            b.size(0), b.size(1), y.size(0), y.size(1));
  TDM_CHECK(ctx.ops->act.add != nullptr);
  const ProfileScope scope(ctx.profiler, "add",
                           [&] { return elementwise_work(y, bytes_of(y, a, b)); });
  ctx.ops->act.add(ctx, y, a, b);
}

void copy(const ExecCtx& ctx, F32Cube y, ConstF32Cube x) {
  TDM_CHECK(x.shape() == y.shape() && (x.size(2) <= 1 || (x.stride(2) == 1 && y.stride(2) == 1)),
            x.size(0), x.size(1), x.size(2));
  TDM_CHECK(ctx.ops->act.copy != nullptr);
  const ProfileScope scope(ctx.profiler, "copy",
                           [&] { return elementwise_work(y, bytes_of(y, x)); });
  ctx.ops->act.copy(ctx, y, x);
}

}  // namespace tandem::ops
