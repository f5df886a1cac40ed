#include "ops/sample.h"

#include "ops/check_views.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem::ops {

void sample(const ExecCtx& ctx, std::span<std::int32_t> ids, ConstF32Mat logits,
            std::span<const SampleRow> rows) {
  TDM_CHECK(rows_contiguous(logits), logits.stride(1));
  TDM_CHECK(static_cast<std::int64_t>(ids.size()) == logits.size(0) && ids.size() == rows.size(),
            ids.size(), rows.size(), logits.size(0));
  for (const SampleRow& row : ctx.host_reads() ? rows : std::span<const SampleRow>{}) {
    TDM_CHECK(row.params.temperature >= 0 && row.params.top_k >= 0, row.params.temperature,
              row.params.top_k);
  }
  TDM_CHECK(ctx.ops->sample.sample != nullptr);
  const ProfileScope scope(ctx.profiler, "sample",
                           [&] { return elementwise_work(logits, bytes_of(logits)); });
  ctx.ops->sample.sample(ctx, ids, logits, rows);
}

}  // namespace tandem::ops
