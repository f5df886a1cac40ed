#include "ops/conv1d.h"

#include "core/checked_cast.h"
#include "ops/check_seqs.h"
#include "ops/check_views.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem::ops {

namespace {

OpWork conv_work(F32Mat y, ConstF32Mat x, std::span<const ConstF32Mat> filters,
                 const SeqBatch& seqs) {
  const std::int64_t taps = filters.front().size(1);
  OpWork work = elementwise_work(
      x, bytes_of(y, x) + static_cast<double>(filters.size()) * bytes_of(filters.front()) +
             slot_bytes(seqs, (taps - 1) * x.size(1)));
  work.flops = 2.0 * static_cast<double>(x.numel() * taps);
  return work;
}

}  // namespace

void conv1d(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, std::span<const ConstF32Mat> filters,
            F32Cube state, const SeqBatch& seqs) {
  TDM_CHECK(rows_contiguous(x) && rows_like(y, x), x.size(0), x.size(1));
  TDM_CHECK(!filters.empty() && isize(filters) <= kMaxConvFilters, filters.size());
  const ConstF32Mat& first = filters.front();
  for (const ConstF32Mat& w : filters) {
    TDM_CHECK(w.contiguous() && same_shape(w, first) && w.size(1) >= 1, w.size(0), w.size(1));
  }
  TDM_CHECK(first.size(0) * isize(filters) == x.size(1), first.size(0), filters.size(), x.size(1));
  check_seqs(ctx, seqs, x.size(0), state.size(0));
  if (seqs.keeps_state()) {
    TDM_CHECK(
        rows_contiguous(state) && state.size(1) == first.size(1) - 1 && state.size(2) == x.size(1),
        state.size(1), state.size(2), first.size(1), x.size(1));
  }
  TDM_CHECK(ctx.ops->conv.conv1d != nullptr);
  const ProfileScope scope(ctx.profiler, "conv1d", [&] { return conv_work(y, x, filters, seqs); });
  ctx.ops->conv.conv1d(ctx, y, x, filters, state, seqs);
}

void conv1d_bwd(const ExecCtx& ctx, F32Mat d_x, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x,
                ConstF32Mat w, const SeqBatch& seqs) {
  TDM_CHECK(rows_contiguous(x) && rows_like(d_x, x) && rows_like(d_y, x), x.size(0), x.size(1));
  TDM_CHECK(w.contiguous() && w.size(0) == x.size(1) && w.size(1) >= 1, w.size(0), w.size(1),
            x.size(1));
  TDM_CHECK(same_shape(d_w, w) && d_w.contiguous(), d_w.size(0), d_w.size(1));
  check_seqs(ctx, seqs, x.size(0));
  TDM_CHECK(!seqs.keeps_state());
  TDM_CHECK(ctx.ops->conv.conv1d_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "conv1d_bwd");
  ctx.ops->conv.conv1d_bwd(ctx, d_x, d_w, d_y, x, w, seqs);
}

}  // namespace tandem::ops
