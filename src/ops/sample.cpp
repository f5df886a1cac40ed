#include "ops/sample.h"

#include "core/checked_cast.h"
#include "ops/check_views.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem::ops {
namespace {

bool is_part(std::int32_t begin, std::int32_t end, std::size_t size) {
  return 0 <= begin && begin <= end && usize(end) <= size;
}

void check_changes(ConstF32Mat logits, const LogitChanges& changes) {
  const std::int64_t vocab = logits.size(1);
  for (const LogitRow& row : changes.rows) {
    TDM_CHECK(row.row >= 0 && row.row < logits.size(0), row.row, logits.size(0));
    TDM_CHECK(row.repetition_penalty > 0, row.row, row.repetition_penalty);
    TDM_CHECK(is_part(row.seen_begin, row.seen_end, changes.seen.size()), row.seen_begin,
              row.seen_end, changes.seen.size());
    TDM_CHECK(is_part(row.bias_begin, row.bias_end, changes.biases.size()), row.bias_begin,
              row.bias_end, changes.biases.size());
    TDM_CHECK(row.mask >= -1 && row.mask < changes.masks.size(0), row.mask, changes.masks.size(0));
  }
  for (const SeenToken& seen : changes.seen) {
    TDM_CHECK(seen.token >= 0 && seen.token < vocab, seen.token, vocab);
  }
  for (const LogitBias& bias : changes.biases) {
    TDM_CHECK(bias.token >= 0 && bias.token < vocab, bias.token, vocab);
  }
}

}  // namespace

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

void adjust_logits(const ExecCtx& ctx, F32Mat logits, const LogitChanges& changes) {
  TDM_CHECK(rows_contiguous(logits), logits.stride(1));
  TDM_CHECK(rows_contiguous(changes.masks) &&
                (changes.masks.empty() || changes.masks.size(1) == (logits.size(1) + 31) / 32),
            changes.masks.size(1), logits.size(1));
  if (ctx.host_reads()) {
    check_changes(logits, changes);
  }
  TDM_CHECK(ctx.ops->sample.adjust_logits != nullptr);
  const ProfileScope scope(ctx.profiler, "adjust_logits");
  ctx.ops->sample.adjust_logits(ctx, logits, changes);
}

void top_tokens(const ExecCtx& ctx, I32Mat ids, ConstF32Mat logits) {
  TDM_CHECK(rows_contiguous(logits) && rows_contiguous(ids), logits.stride(1), ids.stride(1));
  TDM_CHECK(ids.size(0) == logits.size(0) && ids.size(1) <= logits.size(1), ids.size(0),
            ids.size(1), logits.size(0), logits.size(1));
  TDM_CHECK(ctx.ops->sample.top_tokens != nullptr);
  const ProfileScope scope(ctx.profiler, "top_tokens",
                           [&] { return elementwise_work(logits, bytes_of(logits)); });
  ctx.ops->sample.top_tokens(ctx, ids, logits);
}

}  // namespace tandem::ops
