#include "ops/attn_res.h"

#include "ops/check_views.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem::ops {
namespace {

constexpr std::size_t kMaxSources = 32;

template <typename Mat>
bool all_rows_like(std::span<const Mat> sources, ConstF32Mat like) {
  for (const Mat& source : sources) {
    if (!rows_like(source, like)) {
      return false;
    }
  }
  return true;
}

OpWork attn_res_work(F32Mat out, const RowNorm& norm, std::span<const ConstF32Mat> sources,
                     ConstF32Vec w, ConstF32Vec u) {
  OpWork work =
      elementwise_work(sources[0], static_cast<double>(sources.size()) * bytes_of(sources[0]) +
                                       bytes_of(out, norm.y, norm.w, w, u));
  work.shape = fmt::format("{} x ", sources.size()) + work.shape;
  return work;
}

}  // namespace

void attn_res(const ExecCtx& ctx, F32Mat out, const RowNorm& norm,
              std::span<const ConstF32Mat> sources, ConstF32Vec w, ConstF32Vec u, float eps) {
  TDM_CHECK(!sources.empty() && sources.size() <= kMaxSources, sources.size());
  const bool only_normed = norm.wanted() && out.size(1) == 0;
  const F32Mat& result = only_normed ? norm.y : out;
  const std::int64_t dim = result.size(1);
  TDM_CHECK(rows_contiguous(result) && all_rows_like(sources, result), result.size(0), dim);
  TDM_CHECK(vec_of(w, dim) && vec_of(u, dim), w.size(0), u.size(0), dim);
  TDM_CHECK(!norm.wanted() || (rows_like(norm.y, result) && vec_of(norm.w, dim)), norm.y.size(0),
            norm.y.size(1), norm.w.size(0), dim);
  TDM_CHECK(ctx.ops->attn_res.aggregate != nullptr);
  const ProfileScope scope(ctx.profiler, "attn_res",
                           [&] { return attn_res_work(out, norm, sources, w, u); });
  ctx.ops->attn_res.aggregate(ctx, out, norm, sources, w, u, eps);
}

void attn_res_bwd(const ExecCtx& ctx, std::span<const F32Mat> d_sources, F32Vec d_w, F32Vec d_u,
                  ConstF32Mat d_out, std::span<const ConstF32Mat> sources, ConstF32Vec w,
                  ConstF32Vec u, float eps) {
  TDM_CHECK(!sources.empty() && sources.size() <= kMaxSources, sources.size());
  TDM_CHECK(d_sources.size() == sources.size(), d_sources.size(), sources.size());
  TDM_CHECK(
      rows_contiguous(d_out) && all_rows_like(sources, d_out) && all_rows_like(d_sources, d_out),
      d_out.size(0), d_out.size(1));
  const std::int64_t dim = d_out.size(1);
  TDM_CHECK(vec_of(w, dim) && vec_of(u, dim) && vec_of(d_w, dim) && vec_of(d_u, dim), w.size(0),
            u.size(0), d_w.size(0), d_u.size(0), dim);
  TDM_CHECK(ctx.ops->attn_res.aggregate_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "attn_res_bwd");
  ctx.ops->attn_res.aggregate_bwd(ctx, d_sources, d_w, d_u, d_out, sources, w, u, eps);
}

}  // namespace tandem::ops
