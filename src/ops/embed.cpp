#include "ops/embed.h"

#include <algorithm>

#include "ops/check_views.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem::ops {
namespace {

/// A scan of T ids costs nothing beside T rows, and an id out of range would read foreign memory.
bool ids_below(const ExecCtx& ctx, ConstI32Vec ids, std::int64_t limit) {
  return !ctx.host_reads() ||
         std::all_of(ids.data(), ids.data() + ids.size(0),
                     [limit](std::int32_t id) { return id >= 0 && id < limit; });
}

double row_bytes(const WeightRef& table) {
  return static_cast<double>(table.cols) * (table.format == WeightFormat::kBF16 ? 2 : 4);
}

}  // namespace

void embed(const ExecCtx& ctx, F32Mat y, const WeightRef& table, ConstI32Vec ids) {
  TDM_CHECK(table.format == WeightFormat::kF32 || table.format == WeightFormat::kBF16);
  TDM_CHECK(rows_contiguous(y) && y.size(1) == table.cols, y.size(1), table.cols);
  TDM_CHECK(vec_of(ids, y.size(0)), ids.size(0), y.size(0));
  TDM_CHECK(ids_below(ctx, ids, table.rows), table.rows);
  TDM_CHECK(ctx.ops->embed.embed != nullptr);
  const ProfileScope scope(ctx.profiler, "embed", [&] {
    return elementwise_work(
        y, bytes_of(y) + bytes_of(ids) + row_bytes(table) * static_cast<double>(ids.size(0)));
  });
  ctx.ops->embed.embed(ctx, y, table, ids);
}

void embed_bwd(const ExecCtx& ctx, F32Mat d_table, ConstF32Mat d_y, ConstI32Vec ids) {
  TDM_CHECK(rows_contiguous(d_table) && rows_contiguous(d_y) && d_y.size(1) == d_table.size(1),
            d_y.size(1), d_table.size(1));
  TDM_CHECK(vec_of(ids, d_y.size(0)), ids.size(0), d_y.size(0));
  TDM_CHECK(ids_below(ctx, ids, d_table.size(0)), d_table.size(0));
  TDM_CHECK(ctx.ops->embed.embed_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "embed_bwd");
  ctx.ops->embed.embed_bwd(ctx, d_table, d_y, ids);
}

}  // namespace tandem::ops
