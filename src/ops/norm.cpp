#include "ops/norm.h"

#include "core/checked_cast.h"
#include "ops/check_views.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem::ops {

void rms_norm(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, ConstF32Vec w, float eps) {
  TDM_CHECK(rows_contiguous(x) && rows_like(y, x), y.size(0), y.size(1), x.size(0), x.size(1));
  TDM_CHECK(vec_of(w, x.size(1)), w.size(0), x.size(1));
  TDM_CHECK(ctx.ops->norm.rms_norm != nullptr);
  const ProfileScope scope(ctx.profiler, "rms_norm",
                           [&] { return elementwise_work(y, bytes_of(y, x, w)); });
  ctx.ops->norm.rms_norm(ctx, y, x, w, eps);
}

void rms_norm_bwd(const ExecCtx& ctx, F32Mat d_x, F32Vec d_w, ConstF32Mat d_y, ConstF32Mat x,
                  ConstF32Vec w, float eps) {
  TDM_CHECK(rows_contiguous(x) && rows_like(d_x, x) && rows_like(d_y, x), x.size(0), x.size(1));
  TDM_CHECK(vec_of(w, x.size(1)) && vec_of(d_w, x.size(1)), w.size(0), d_w.size(0), x.size(1));
  TDM_CHECK(ctx.ops->norm.rms_norm_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "rms_norm_bwd");
  ctx.ops->norm.rms_norm_bwd(ctx, d_x, d_w, d_y, x, w, eps);
}

void rms_norm_gated(const ExecCtx& ctx, F32Cube y, ConstF32Cube o, ConstF32Cube gate, ConstF32Vec w,
                    float eps) {
  TDM_CHECK(rows_contiguous(o) && rows_like(y, o) && rows_like(gate, o), o.size(0), o.size(1),
            o.size(2));
  TDM_CHECK(vec_of(w, o.size(2)), w.size(0), o.size(2));
  TDM_CHECK(ctx.ops->norm.rms_norm_gated != nullptr);
  const ProfileScope scope(ctx.profiler, "rms_norm_gated",
                           [&] { return elementwise_work(y, bytes_of(y, o, gate, w)); });
  ctx.ops->norm.rms_norm_gated(ctx, y, o, gate, w, eps);
}

void rms_norm_gated_bwd(const ExecCtx& ctx, F32Cube d_o, F32Cube d_gate, F32Vec d_w,
                        ConstF32Cube d_y, ConstF32Cube o, ConstF32Cube gate, ConstF32Vec w,
                        float eps) {
  TDM_CHECK(rows_contiguous(o) && rows_like(d_o, o) && rows_like(d_gate, o) && rows_like(d_y, o) &&
                rows_like(gate, o),
            o.size(0), o.size(1), o.size(2));
  TDM_CHECK(vec_of(w, o.size(2)) && vec_of(d_w, o.size(2)), w.size(0), d_w.size(0), o.size(2));
  TDM_CHECK(ctx.ops->norm.rms_norm_gated_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "rms_norm_gated_bwd");
  ctx.ops->norm.rms_norm_gated_bwd(ctx, d_o, d_gate, d_w, d_y, o, gate, w, eps);
}

void l2_norm(const ExecCtx& ctx, F32Cube y, ConstF32Cube x, std::span<const float> scales,
             float eps) {
  TDM_CHECK(rows_contiguous(x) && rows_like(y, x), x.size(0), x.size(1), x.size(2));
  TDM_CHECK(!scales.empty() && isize(scales) <= kMaxL2Scales && x.size(1) % isize(scales) == 0,
            scales.size(), x.size(1));
  TDM_CHECK(ctx.ops->norm.l2_norm != nullptr);
  const ProfileScope scope(ctx.profiler, "l2_norm",
                           [&] { return elementwise_work(y, bytes_of(y, x)); });
  ctx.ops->norm.l2_norm(ctx, y, x, scales, eps);
}

void l2_norm_bwd(const ExecCtx& ctx, F32Cube d_x, ConstF32Cube d_y, ConstF32Cube x, float scale,
                 float eps) {
  TDM_CHECK(rows_contiguous(x) && rows_like(d_x, x) && rows_like(d_y, x), x.size(0), x.size(1),
            x.size(2));
  TDM_CHECK(ctx.ops->norm.l2_norm_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "l2_norm_bwd");
  ctx.ops->norm.l2_norm_bwd(ctx, d_x, d_y, x, scale, eps);
}

}  // namespace tandem::ops
