#include "ops/mla.h"

#include "ops/check_seqs.h"
#include "ops/check_views.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem {
namespace {

template <typename T, int Rank>
void check_dense_rows(const TensorView<T, Rank>& x) {
  TDM_CHECK(x.size(Rank - 1) <= 1 || x.stride(Rank - 1) == 1, x.stride(Rank - 1));
}

void check_pages(const ExecCtx& ctx, const MlaCacheView& cache, const MlaBatch& batch,
                 std::int64_t query_rows) {
  if (cache.is_batch()) {
    TDM_CHECK(cache.rows.num_rows == query_rows, cache.rows.num_rows, query_rows);
    TDM_CHECK(cache.rows.format == LatentFormat::kF32);
    return;
  }
  const std::int64_t num_seqs = batch.cu_seqlens.size(0) - 1;
  TDM_CHECK(cache.page_size >= 1, cache.page_size);
  TDM_CHECK(batch.kv_lens.size(0) == num_seqs && cache.page_table.size(0) == num_seqs,
            batch.kv_lens.size(0), cache.page_table.size(0), num_seqs);
  for (std::int64_t b = 0; b < num_seqs && ctx.host_reads(); ++b) {
    const std::int64_t keys = batch.kv_lens(b);
    const std::int64_t rows = batch.cu_seqlens(b + 1) - batch.cu_seqlens(b);
    TDM_CHECK(keys == 0 || keys >= rows, b, keys, rows);
    const std::int64_t pages = (keys + cache.page_size - 1) / cache.page_size;
    TDM_CHECK(pages <= cache.page_table.size(1), b, keys, cache.page_table.size(1));
    for (std::int64_t page = 0; page < pages; ++page) {
      const std::int64_t id = cache.page_table(b, page);
      TDM_CHECK(id >= 0 && (id + 1) * cache.page_size <= cache.rows.num_rows, b, page, id);
    }
  }
}

void check_rows(const LatentRows& rows, std::int64_t width) {
  TDM_CHECK(rows.width == width, rows.width, width);
  TDM_CHECK(rows.row_bytes >= width * element_bytes(rows.format), rows.row_bytes, width);
}

void check_slots(const ExecCtx& ctx, const LatentRows& rows, ConstI32Vec slot_mapping) {
  for (std::int64_t t = 0; t < slot_mapping.size(0) && ctx.host_reads(); ++t) {
    TDM_CHECK(slot_mapping(t) >= -1 && slot_mapping(t) < rows.num_rows, t, slot_mapping(t));
  }
}

template <typename T>
void check_query(const MlaQueryParts<T>& q, std::int64_t dim) {
  TDM_CHECK(q.latent.size(0) == q.shared.size(0) && q.latent.size(1) == q.shared.size(1),
            q.latent.size(0), q.latent.size(1), q.shared.size(0), q.shared.size(1));
  TDM_CHECK(q.latent.size(2) > 0 && q.latent.size(2) + q.shared.size(2) == dim, q.latent.size(2),
            q.shared.size(2), dim);
  check_dense_rows(q.latent);
  check_dense_rows(q.shared);
}

OpWork prepare_work(const MlaPrepare& x) {
  const auto row = static_cast<double>(x.kv_raw.size(1) * element_bytes(x.rows.format));
  OpWork work;
  work.shape = fmt::format("{}, {}", shape_of(x.cq_raw), shape_of(x.kv_raw));
  work.bytes = bytes_of(x.cq, x.kv, x.cq_raw, x.kv_raw, x.slot_mapping) +
               (x.rows.empty() ? 0.0 : row * static_cast<double>(x.kv_raw.size(0)));
  return work;
}

OpWork absorbed_work(F32Cube o_lat, const MlaQuery& q, const MlaCacheView& cache) {
  OpWork work;
  work.shape = fmt::format("{} + {}, {}", shape_of(q.latent), q.shared.size(2),
                           latent_format_name(cache.rows.format));
  work.bytes = bytes_of(q.latent, q.shared) + bytes_of(o_lat);
  work.bytes_per_key = static_cast<double>(cache.rows.width * element_bytes(cache.rows.format));
  work.flops_per_pair =
      2.0 * static_cast<double>(q.latent.size(1) * (cache.rows.width + o_lat.size(2)));
  return work;
}

}  // namespace

namespace ops {

void mla_prepare(const ExecCtx& ctx, const MlaPrepare& x) {
  const std::int64_t tokens = x.kv_raw.size(0);
  TDM_CHECK(x.kv_weight.size(0) > 0 && x.kv_weight.size(0) <= x.kv_raw.size(1), x.kv_weight.size(0),
            x.kv_raw.size(1));
  TDM_CHECK(rows_contiguous(x.kv_raw) && rows_contiguous(x.kv_weight));
  TDM_CHECK(x.cq.empty() || (rows_like(x.cq, x.cq_raw) && x.cq.size(0) == tokens &&
                             rows_contiguous(x.cq_raw) && vec_of(x.q_weight, x.cq.size(1))),
            x.cq.size(0), x.cq.size(1), tokens);
  TDM_CHECK(x.kv.empty() || rows_like(x.kv, x.kv_raw), x.kv.size(0), x.kv.size(1));
  if (!x.rows.empty()) {
    check_rows(x.rows, x.kv_raw.size(1));
    TDM_CHECK(x.slot_mapping.size(0) == tokens, x.slot_mapping.size(0), tokens);
    check_slots(ctx, x.rows, x.slot_mapping);
  }
  const ProfileScope scope(ctx.profiler, "mla_prepare", [&] { return prepare_work(x); });
  ctx.ops->mla.prepare(ctx, x);
}

void mla_store(const ExecCtx& ctx, const LatentRows& rows, ConstF32Mat kv,
               ConstI32Vec slot_mapping) {
  check_rows(rows, kv.size(1));
  TDM_CHECK(slot_mapping.size(0) == kv.size(0), slot_mapping.size(0), kv.size(0));
  check_dense_rows(kv);
  check_slots(ctx, rows, slot_mapping);
  const ProfileScope scope(ctx.profiler, "mla_store", [&] {
    return elementwise_work(kv, 2 * bytes_of(kv) + bytes_of(slot_mapping));
  });
  ctx.ops->mla.store(ctx, rows, kv, slot_mapping);
}

void mla_absorbed(const ExecCtx& ctx, F32Cube o_lat, F32Mat lse, const MlaQuery& q,
                  const MlaCacheView& cache, const MlaBatch& batch, float scale) {
  check_query(q, cache.rows.width);
  TDM_CHECK(o_lat.shape() == q.latent.shape(), o_lat.size(0), o_lat.size(1), o_lat.size(2));
  TDM_CHECK(lse.empty() || (lse.size(0) == o_lat.size(0) && lse.size(1) == o_lat.size(1)),
            lse.size(0), lse.size(1));
  check_dense_rows(o_lat);
  check_seqs(ctx, {batch.cu_seqlens, {}}, o_lat.size(0));
  check_pages(ctx, cache, batch, o_lat.size(0));
  const ProfileScope scope(ctx.profiler, "mla_absorbed",
                           [&] { return absorbed_work(o_lat, q, cache); });
  ctx.ops->mla.absorbed(ctx, o_lat, lse, q, cache, batch, scale);
}

void mla_absorbed_bwd(const ExecCtx& ctx, const MlaQueryGrad& d_q, F32Mat d_kv,
                      ConstF32Cube d_o_lat, const MlaQuery& q, ConstF32Mat kv, ConstF32Cube o_lat,
                      ConstF32Mat lse, ConstI32Vec cu_seqlens, float scale) {
  check_query(q, kv.size(1));
  check_query(d_q, kv.size(1));
  TDM_CHECK(d_q.latent.shape() == q.latent.shape() && d_o_lat.shape() == q.latent.shape() &&
                o_lat.shape() == q.latent.shape(),
            q.latent.size(0), q.latent.size(1), q.latent.size(2));
  TDM_CHECK(o_lat.size(0) == kv.size(0) && d_kv.shape() == kv.shape(), o_lat.size(0), kv.size(0),
            kv.size(1));
  TDM_CHECK(lse.size(0) == o_lat.size(0) && lse.size(1) == o_lat.size(1), lse.size(0), lse.size(1));
  check_dense_rows(d_kv);
  check_dense_rows(d_o_lat);
  check_dense_rows(kv);
  check_dense_rows(o_lat);
  check_seqs(ctx, {cu_seqlens, {}}, o_lat.size(0));
  const ProfileScope scope(ctx.profiler, "mla_absorbed_bwd");
  ctx.ops->mla.absorbed_bwd(ctx, d_q, d_kv, d_o_lat, q, kv, o_lat, lse, cu_seqlens, scale);
}

void mla_expanded(const ExecCtx& ctx, F32Cube o, ConstF32Cube q, ConstF32Cube k_nope,
                  ConstF32Mat k_shared, ConstF32Cube v, ConstI32Vec cu_seqlens, float scale) {
  const std::int64_t rows = q.size(0);
  const std::int64_t heads = q.size(1);
  TDM_CHECK(k_nope.size(0) == rows && k_nope.size(1) == heads && k_shared.size(0) == rows,
            k_nope.size(0), k_nope.size(1), k_shared.size(0));
  TDM_CHECK(k_nope.size(2) + k_shared.size(1) == q.size(2), k_nope.size(2), k_shared.size(1),
            q.size(2));
  TDM_CHECK(v.size(0) == rows && v.size(1) == heads && o.shape() == v.shape(), v.size(0), v.size(1),
            v.size(2));
  check_dense_rows(o);
  check_dense_rows(q);
  check_dense_rows(k_nope);
  check_dense_rows(k_shared);
  check_dense_rows(v);
  check_seqs(ctx, {cu_seqlens, {}}, rows);
  const ProfileScope scope(ctx.profiler, "mla_expanded");
  ctx.ops->mla.expanded(ctx, o, q, k_nope, k_shared, v, cu_seqlens, scale);
}

}  // namespace ops
}  // namespace tandem
