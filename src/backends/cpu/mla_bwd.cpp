// mla_bwd.cpp — gradients of absorbed MLA on packed training sequences.   Contract: ops/mla.h
// Oracle: ops/ref/mla_ref.h
//
// With p = exp(scale s - lse) recomputed, d_p = d_o . c and delta = d_o . o:
//   d_s = p (d_p - delta) scale;  d_q += d_s row;  d_row += d_s q, and + p d_o on its c part.
// Two passes, so that every sum has one owner and one order: blocks of query rows give d_q (keys in
// order of position), blocks of keys give d_kv (query rows from the last to the first, which makes
// the visible ones a prefix). The price is a second pair of dot products.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/mla_bwd.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <span>

#include "backends/cpu/mla-inl.h"
#include "backends/cpu/mla.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kBlockRows = 16;  // query rows, or keys, of a work item

struct BwdCall {
  MlaQueryGrad d_q;
  F32Mat d_kv;
  ConstF32Cube d_o;
  MlaQuery q;
  ConstF32Mat kv;
  ConstF32Cube o;
  ConstF32Mat lse;
  ConstI32Vec cu_seqlens;
  float scale;
  float* delta;  // [T * H]

  [[nodiscard]] std::int64_t heads() const { return o.size(1); }
  [[nodiscard]] std::int64_t dim() const { return kv.size(1); }
  [[nodiscard]] std::int64_t latent() const { return d_o.size(2); }
  [[nodiscard]] std::int64_t padded_dim() const { return round_up(dim(), kLanes); }
  [[nodiscard]] std::int64_t padded_latent() const { return round_up(latent(), kLanes); }
};

struct BwdScratch {
  float* x;    // [kBlockRows, padded_dim] queries, or key rows
  float* g;    // [kBlockRows, padded_latent] d_o, or the c part of key rows
  float* sum;  // [kBlockRows, padded_dim] the gradient
  float* s;    // [kBlockRows, kKeyTile] scores, then p
  float* d_s;  // [kBlockRows, kKeyTile] d_p, then d_s
  float* q;    // [kKeyTile, padded_dim] the queries of a tile

  BwdScratch(float* base, const BwdCall& call)
      : x(base),
        g(x + kBlockRows * call.padded_dim()),
        sum(g + kBlockRows * call.padded_latent()),
        s(sum + kBlockRows * call.padded_dim()),
        d_s(s + kBlockRows * kKeyTile),
        q(d_s + kBlockRows * kKeyTile) {}
  static std::int64_t floats(const BwdCall& call) {
    return kBlockRows * (2 * call.padded_dim() + call.padded_latent() + 2 * kKeyTile) +
           kKeyTile * call.padded_dim();
  }
};

struct WorkItem {
  std::int64_t begin;  // first row of the sequence in the batch
  std::int64_t rows;   // of the sequence
  std::int64_t first;  // of the item: query row t * H + h, or key
  std::int64_t count;
};

/// Scores and their gradients of one tile: s <- p, d_s <- p (d_p - delta) scale on the first
/// `valid` columns. lse and delta are one number, or one a column.
template <class LoadFn>
void score_gradients(float* s, float* d_s, std::int64_t valid, float scale, const LoadFn& load) {
  const FloatTag d;
  const FloatVec factor = hn::Set(d, scale);
  for (std::int64_t j = 0; j < valid; j += kLanes) {
    const auto [lse, delta] = load(j);
    const FloatVec p = vexp(FloatTag(), hn::Sub(hn::Mul(factor, hn::LoadU(d, s + j)), lse));
    const FloatVec slope = hn::Mul(hn::Sub(hn::LoadU(d, d_s + j), delta), factor);
    hn::StoreU(p, d, s + j);
    hn::StoreU(hn::Mul(p, slope), d, d_s + j);
  }
}

struct RowStats {
  FloatVec lse, delta;
};

/// Channels [begin, begin + count) of row i of the sums.
void store_sums(const BwdScratch& mine, const BwdCall& call, std::int64_t i, std::int64_t begin,
                std::int64_t count, float* out) {
  const float* const from = mine.sum + i * call.padded_dim() + begin;
  std::copy(from, from + count, out);
}

void query_item(const BwdCall& call, const WorkItem& item, const BwdScratch& mine) {
  const FloatTag d;
  const std::int64_t heads = call.heads();
  const std::int64_t dp = call.padded_dim();
  const auto token = [&](std::int64_t i) { return item.begin + (item.first + i) / heads; };
  const auto head = [&](std::int64_t i) { return (item.first + i) % heads; };
  for (std::int64_t i = 0; i < item.count; ++i) {
    copy_query(call.q, token(i), head(i), mine.x + i * dp);
    copy_padded(&call.d_o(token(i), head(i), 0), call.latent(), mine.g + i * call.padded_latent());
  }
  std::fill(mine.sum, mine.sum + item.count * dp, 0.0F);
  const std::int64_t num_keys = (item.first + item.count - 1) / heads + 1;
  for (std::int64_t begin = 0; begin < num_keys; begin += kKeyTile) {
    const std::int64_t count = std::min(kKeyTile, num_keys - begin);
    const float* keys[kKeyTile];
    for (std::int64_t j = 0; j < count; ++j) {
      keys[j] = call.kv.row(item.begin + begin + j);
    }
    dot_rows(mine.x, dp, item.count, keys, count, call.dim(), mine.s);
    dot_rows(mine.g, call.padded_latent(), item.count, keys, count, call.latent(), mine.d_s);
    std::int64_t valid[kBlockRows];
    for (std::int64_t i = 0; i < item.count; ++i) {
      valid[i] = std::clamp<std::int64_t>(token(i) - item.begin + 1 - begin, 0, count);
      const RowStats stats{hn::Set(d, call.lse(token(i), head(i))),
                           hn::Set(d, call.delta[token(i) * heads + head(i)])};
      score_gradients(mine.s + i * kKeyTile, mine.d_s + i * kKeyTile, valid[i], call.scale,
                      [&](std::int64_t) { return stats; });
    }
    sum_rows(mine.sum, dp, item.count, mine.d_s, kKeyTile, keys, valid, call.dim());
  }
  for (std::int64_t i = 0; i < item.count; ++i) {
    const F32Cube& latent = call.d_q.latent;
    const F32Cube& shared = call.d_q.shared;
    store_sums(mine, call, i, 0, call.latent(), latent.row(token(i)) + head(i) * latent.stride(1));
    store_sums(mine, call, i, call.latent(), call.dim() - call.latent(),
               shared.row(token(i)) + head(i) * shared.stride(1));
  }
}

void key_item(const BwdCall& call, const WorkItem& item, const BwdScratch& mine) {
  const FloatTag d;
  const std::int64_t heads = call.heads();
  const std::int64_t dp = call.padded_dim();
  for (std::int64_t i = 0; i < item.count; ++i) {
    const float* row = call.kv.row(item.begin + item.first + i);
    copy_padded(row, call.dim(), mine.x + i * dp);
    copy_padded(row, call.latent(), mine.g + i * call.padded_latent());
  }
  std::fill(mine.sum, mine.sum + item.count * dp, 0.0F);
  // Query rows of the sequence from the last: number r is row `last - r`.
  const std::int64_t last = item.rows * heads - 1;
  const std::int64_t num_queries = (item.rows - item.first) * heads;
  for (std::int64_t begin = 0; begin < num_queries; begin += kKeyTile) {
    const std::int64_t count = std::min(kKeyTile, num_queries - begin);
    const float* queries[kKeyTile];
    const float* grads[kKeyTile];
    alignas(64) float lse[kKeyTile] = {};
    alignas(64) float delta[kKeyTile] = {};
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t t = item.begin + (last - begin - j) / heads;
      const std::int64_t h = (last - begin - j) % heads;
      copy_query(call.q, t, h, mine.q + j * dp);
      queries[j] = mine.q + j * dp;
      grads[j] = &call.d_o(t, h, 0);
      lse[j] = call.lse(t, h);
      delta[j] = call.delta[t * heads + h];
    }
    dot_rows(mine.x, dp, item.count, queries, count, call.dim(), mine.s);
    dot_rows(mine.g, call.padded_latent(), item.count, grads, count, call.latent(), mine.d_s);
    std::int64_t valid[kBlockRows];
    for (std::int64_t i = 0; i < item.count; ++i) {
      const std::int64_t visible = (item.rows - item.first - i) * heads;
      valid[i] = std::clamp<std::int64_t>(visible - begin, 0, count);
      score_gradients(mine.s + i * kKeyTile, mine.d_s + i * kKeyTile, valid[i], call.scale,
                      [&](std::int64_t j) {
                        return RowStats{hn::Load(d, lse + j), hn::Load(d, delta + j)};
                      });
    }
    sum_rows(mine.sum, dp, item.count, mine.d_s, kKeyTile, queries, valid, call.dim());
    sum_rows(mine.sum, dp, item.count, mine.s, kKeyTile, grads, valid, call.latent());
  }
  for (std::int64_t i = 0; i < item.count; ++i) {
    store_sums(mine, call, i, 0, call.dim(), call.d_kv.row(item.begin + item.first + i));
  }
}

/// Blocks of kBlockRows of the `per_token` rows each token has.
std::span<const WorkItem> make_items(const ExecCtx& ctx, ConstI32Vec cu_seqlens,
                                     std::int64_t per_token) {
  const std::int64_t num_seqs = cu_seqlens.size(0) - 1;
  std::int64_t total = 0;
  for (std::int64_t b = 0; b < num_seqs; ++b) {
    total += ((cu_seqlens(b + 1) - cu_seqlens(b)) * per_token + kBlockRows - 1) / kBlockRows;
  }
  const std::span<WorkItem> items = ctx.workspace->take<WorkItem>(total);
  std::size_t next = 0;
  for (std::int64_t b = 0; b < num_seqs; ++b) {
    const std::int64_t rows = cu_seqlens(b + 1) - cu_seqlens(b);
    for (std::int64_t first = 0; first < rows * per_token; first += kBlockRows) {
      items[next++] = {cu_seqlens(b), rows, first, std::min(kBlockRows, rows * per_token - first)};
    }
  }
  return items;
}

void fill_delta(const ExecCtx& ctx, const BwdCall& call) {
  constexpr std::int64_t kTokens = 16;
  const std::int64_t tokens = call.kv.size(0);
  ctx.pool->parallel_for((tokens + kTokens - 1) / kTokens, [&](std::int64_t b, int) HWY_ATTR {
    for (std::int64_t t = b * kTokens; t < std::min(tokens, (b + 1) * kTokens); ++t) {
      for (std::int64_t h = 0; h < call.heads(); ++h) {
        FloatVec dot = hn::Zero(FloatTag());
        for (std::int64_t c = 0; c < call.latent(); c += kLanes) {
          const std::int64_t n = call.latent() - c;
          dot = hn::MulAdd(load_first(&call.d_o(t, h, 0) + c, n),
                           load_first(&call.o(t, h, 0) + c, n), dot);
        }
        call.delta[t * call.heads() + h] = sum_lanes(dot);
      }
    }
  });
}

void absorbed_bwd(const ExecCtx& ctx, const MlaQueryGrad& d_q, F32Mat d_kv, ConstF32Cube d_o_lat,
                  const MlaQuery& q, ConstF32Mat kv, ConstF32Cube o_lat, ConstF32Mat lse,
                  ConstI32Vec cu_seqlens, float scale) {
  const ArenaScope scope(*ctx.workspace);
  float* delta = ctx.workspace->take<float>(lse.numel()).data();
  const BwdCall call{d_q, d_kv, d_o_lat, q, kv, o_lat, lse, cu_seqlens, scale, delta};
  fill_delta(ctx, call);
  const std::span<const WorkItem> by_query = make_items(ctx, cu_seqlens, call.heads());
  const std::span<const WorkItem> by_key = make_items(ctx, cu_seqlens, 1);
  const std::int64_t per_thread = round_up(BwdScratch::floats(call), 16);
  float* base = ctx.workspace->take<float>(per_thread * ctx.pool->num_threads()).data();
  ctx.pool->parallel_for(isize(by_query) + isize(by_key), [&](std::int64_t i, int thread) HWY_ATTR {
    const BwdScratch mine(base + thread * per_thread, call);
    if (i < isize(by_key)) {
      key_item(call, by_key[usize(i)], mine);
    } else {
      query_item(call, by_query[usize(i - isize(by_key))], mine);
    }
  });
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(absorbed_bwd);

void cpu::mla_absorbed_bwd(const ExecCtx& ctx, const MlaQueryGrad& d_q, F32Mat d_kv,
                           ConstF32Cube d_o_lat, const MlaQuery& q, ConstF32Mat kv,
                           ConstF32Cube o_lat, ConstF32Mat lse, ConstI32Vec cu_seqlens,
                           float scale) {
  HWY_DYNAMIC_DISPATCH(absorbed_bwd)
  (ctx, d_q, d_kv, d_o_lat, q, kv, o_lat, lse, cu_seqlens, scale);
}

}  // namespace tandem
#endif
