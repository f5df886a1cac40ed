// mla_attend.cpp — MLA forward: absorbed over the paged cache, and the expanded form.
// Contract: ops/mla.h   Oracle: ops/ref/mla_ref.h
//
// A work item is a few query rows (t, h) of one sequence, in order of t then h. It walks the keys
// in tiles of kKeyTile from position 0: dot products, online softmax, weighted sum. The rows'
// queries stay in L1, each key row is read once per tile from L2. Numbers: docs/kernels/mla.md.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/mla_attend.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <cmath>
#include <span>

#include "backends/cpu/mla-inl.h"
#include "backends/cpu/mla.h"
#include "core/checked_cast.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kMaxRows = 16;  // query rows of a work item: 16 x 576 floats fit in L1
constexpr std::int64_t kMinRows = 4;   // the same when there are few rows: one long decode

struct WorkItem {
  std::int64_t seq;
  std::int64_t first;  // index t * H + h within the sequence
  std::int64_t rows;
};

struct AttendShape {
  std::int64_t dim;     // of q and keys
  std::int64_t values;  // of values and outputs
  [[nodiscard]] std::int64_t padded_dim() const { return round_up(dim, kLanes); }
  [[nodiscard]] std::int64_t padded_values() const { return round_up(values, kLanes); }
};

struct AttendScratch {
  float* q;      // [kMaxRows, padded_dim]
  float* o;      // [kMaxRows, padded_values]
  float* s;      // [kMaxRows, kKeyTile]
  float* extra;  // what a key source needs
  SoftmaxRow* softmax;

  AttendScratch(float* base, SoftmaxRow* rows, AttendShape shape)
      : q(base),
        o(q + kMaxRows * shape.padded_dim()),
        s(o + kMaxRows * shape.padded_values()),
        extra(s + kMaxRows * kKeyTile),
        softmax(rows) {}
  static std::int64_t floats(AttendShape shape, std::int64_t extra) {
    return kMaxRows * (shape.padded_dim() + shape.padded_values() + kKeyTile) + extra;
  }
};

/// Pointers of one tile of keys.
struct KeyPointers {
  const float* key[kKeyTile];
  const float* value[kKeyTile];
};

/// Runs the rows already copied to scratch.q over the keys; row i sees visible[i] keys, which do
/// not decrease with i. Leaves the unnormalised sums in scratch.o.
template <class FillFn>
void attend(const AttendScratch& scratch, AttendShape shape, std::int64_t rows,
            const std::int64_t* visible, float scale, const FillFn& fill) {
  std::fill(scratch.o, scratch.o + rows * shape.padded_values(), 0.0F);
  std::fill(scratch.softmax, scratch.softmax + rows, SoftmaxRow());
  KeyPointers pointers;
  const std::int64_t num_keys = visible[rows - 1];
  for (std::int64_t begin = 0; begin < num_keys; begin += kKeyTile) {
    const std::int64_t count = std::min(kKeyTile, num_keys - begin);
    fill(begin, count, pointers);
    dot_rows(scratch.q, shape.padded_dim(), rows, pointers.key, count, shape.dim, scratch.s);
    std::int64_t valid[kMaxRows];
    for (std::int64_t i = 0; i < rows; ++i) {
      valid[i] = std::clamp<std::int64_t>(visible[i] - begin, 0, count);
      if (valid[i] == 0) {
        continue;
      }
      const float correction =
          softmax_tile(scratch.s + i * kKeyTile, valid[i], scale, scratch.softmax[i]);
      if (correction != 1.0F) {
        scale_row(scratch.o + i * shape.padded_values(), shape.padded_values(), correction);
      }
    }
    sum_rows(scratch.o, shape.padded_values(), rows, scratch.s, kKeyTile, pointers.value, valid,
             shape.values);
  }
}

/// out = o / sum; returns the log of the softmax sum.
float finish_row(const AttendScratch& scratch, AttendShape shape, std::int64_t i, float* out) {
  const FloatTag d;
  const SoftmaxRow& row = scratch.softmax[i];
  const float sum = sum_lanes(hn::Load(d, row.sum));
  const float* o = scratch.o + i * shape.padded_values();
  for (std::int64_t c = 0; c < shape.values; c += kLanes) {
    store_first(hn::Div(hn::Load(d, o + c), hn::Set(d, sum)), out + c, shape.values - c);
  }
  return row.top + std::log(sum);
}

/// Fixed row blocks over all sequences, heaviest first. Smaller blocks when there are few rows:
/// nothing crosses a row, so the choice is free.
std::span<const WorkItem> make_items(const ExecCtx& ctx, ConstI32Vec cu_seqlens,
                                     std::int64_t rows_per_token) {
  const std::int64_t num_seqs = cu_seqlens.size(0) - 1;
  const auto rows_of = [&](std::int64_t b) {
    return (cu_seqlens(b + 1) - cu_seqlens(b)) * rows_per_token;
  };
  const auto count = [&](std::int64_t block) {
    std::int64_t n = 0;
    for (std::int64_t b = 0; b < num_seqs; ++b) {
      n += (rows_of(b) + block - 1) / block;
    }
    return n;
  };
  const std::int64_t block = count(kMaxRows) < 2 * ctx.pool->num_threads() ? kMinRows : kMaxRows;
  const std::span<WorkItem> items = ctx.workspace->take<WorkItem>(count(block));
  std::size_t next = items.size();
  for (std::int64_t b = 0; b < num_seqs; ++b) {
    for (std::int64_t first = 0; first < rows_of(b); first += block) {
      items[--next] = {b, first, std::min(block, rows_of(b) - first)};
    }
  }
  return items;
}

/// fn(item, scratch) over all items in parallel.
template <class Fn>
void run_items(const ExecCtx& ctx, std::span<const WorkItem> items, AttendShape shape,
               std::int64_t extra, const Fn& fn) {
  const std::int64_t per_thread = round_up(AttendScratch::floats(shape, extra), 16);
  const std::int64_t threads = ctx.pool->num_threads();
  float* base = ctx.workspace->take<float>(per_thread * threads).data();
  SoftmaxRow* softmax = ctx.workspace->take<SoftmaxRow>(kMaxRows * threads).data();
  ctx.pool->parallel_for(isize(items), [&](std::int64_t i, int thread) HWY_ATTR {
    const AttendScratch scratch(base + thread * per_thread, softmax + thread * kMaxRows, shape);
    fn(items[usize(i)], scratch);
  });
}

/// Bytes of key `key`: those of the cache row, or of the batch's own row.
const std::byte* key_row(const MlaCacheView& cache, std::int64_t seq, std::int64_t batch_begin,
                         std::int64_t key) {
  if (cache.is_batch()) {
    return cache.rows.row(batch_begin + key);
  }
  return cache.rows.row(cache.page_table(seq, key / cache.page_size) * cache.page_size +
                        key % cache.page_size);
}

void absorbed(const ExecCtx& ctx, F32Cube o_lat, F32Mat lse, const MlaQuery& q,
              const MlaCacheView& cache, const MlaBatch& batch, float scale) {
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t heads = o_lat.size(1);
  const AttendShape shape{cache.rows.width, o_lat.size(2)};
  const bool decodes = cache.rows.format != LatentFormat::kF32;
  const std::int64_t extra = decodes ? kKeyTile * shape.padded_dim() : 0;
  const std::span<const WorkItem> items = make_items(ctx, batch.cu_seqlens, heads);
  run_items(
      ctx, items, shape, extra, [&](const WorkItem& item, const AttendScratch& mine) HWY_ATTR {
        const std::int64_t begin = batch.cu_seqlens(item.seq);
        const std::int64_t rows = batch.cu_seqlens(item.seq + 1) - begin;
        const std::int64_t num_keys = cache.is_batch() ? rows : batch.kv_lens(item.seq);
        const auto token = [&](std::int64_t i) { return (item.first + i) / heads; };
        const auto head = [&](std::int64_t i) { return (item.first + i) % heads; };
        if (num_keys == 0) {  // padding
          for (std::int64_t i = 0; i < item.rows; ++i) {
            float* out = &o_lat(begin + token(i), head(i), 0);
            std::fill(out, out + shape.values, 0.0F);
            if (!lse.empty()) {
              lse(begin + token(i), head(i)) = 0.0F;
            }
          }
          return;
        }
        std::int64_t visible[kMaxRows];
        for (std::int64_t i = 0; i < item.rows; ++i) {
          visible[i] = num_keys - (rows - 1 - token(i));
          copy_query(q, begin + token(i), head(i), mine.q + i * shape.padded_dim());
        }
        const auto fill = [&](std::int64_t first, std::int64_t count, KeyPointers& p) {
          for (std::int64_t j = 0; j < count; ++j) {
            const std::byte* row = key_row(cache, item.seq, begin, first + j);
            if (decodes) {
              const std::span<float> key(mine.extra + j * shape.padded_dim(), usize(shape.dim));
              decode_latent(key, row, cache.rows.format);
              p.key[j] = p.value[j] = key.data();
            } else {
              p.key[j] = p.value[j] = reinterpret_cast<const float*>(row);
            }
          }
        };
        attend(mine, shape, item.rows, visible, scale, fill);
        for (std::int64_t i = 0; i < item.rows; ++i) {
          const float sum = finish_row(mine, shape, i, &o_lat(begin + token(i), head(i), 0));
          if (!lse.empty()) {
            lse(begin + token(i), head(i)) = sum;
          }
        }
      });
}

void expanded(const ExecCtx& ctx, F32Cube o, ConstF32Cube q, ConstF32Cube k_nope,
              ConstF32Mat k_shared, ConstF32Cube v, ConstI32Vec cu_seqlens, float scale) {
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t heads = q.size(1);
  const std::int64_t nope = k_nope.size(2);
  const AttendShape shape{q.size(2), v.size(2)};
  // Every head has its own keys: items are rows of one token axis, each run for all heads.
  const std::span<const WorkItem> items = make_items(ctx, cu_seqlens, 1);
  const std::int64_t extra = kKeyTile * shape.padded_dim();
  run_items(ctx, items, shape, extra,
            [&](const WorkItem& item, const AttendScratch& mine) HWY_ATTR {
              const std::int64_t begin = cu_seqlens(item.seq);
              for (std::int64_t h = 0; h < heads; ++h) {
                std::int64_t visible[kMaxRows];
                for (std::int64_t i = 0; i < item.rows; ++i) {
                  visible[i] = item.first + i + 1;
                  copy_padded(&q(begin + item.first + i, h, 0), shape.dim,
                              mine.q + i * shape.padded_dim());
                }
                const auto fill = [&](std::int64_t first, std::int64_t count, KeyPointers& p) {
                  for (std::int64_t j = 0; j < count; ++j) {
                    const std::int64_t t = begin + first + j;
                    float* key = mine.extra + j * shape.padded_dim();
                    const float* from = nope > 0 ? &k_nope(t, h, 0) : nullptr;
                    std::copy(from, from + nope, key);
                    std::copy(k_shared.row(t), k_shared.row(t) + k_shared.size(1), key + nope);
                    p.key[j] = key;
                    p.value[j] = &v(t, h, 0);
                  }
                };
                attend(mine, shape, item.rows, visible, scale, fill);
                for (std::int64_t i = 0; i < item.rows; ++i) {
                  (void)finish_row(mine, shape, i, &o(begin + item.first + i, h, 0));
                }
              }
            });
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(absorbed);
HWY_EXPORT(expanded);

void cpu::mla_absorbed(const ExecCtx& ctx, F32Cube o_lat, F32Mat lse, const MlaQuery& q,
                       const MlaCacheView& cache, const MlaBatch& batch, float scale) {
  HWY_DYNAMIC_DISPATCH(absorbed)(ctx, o_lat, lse, q, cache, batch, scale);
}
void cpu::mla_expanded(const ExecCtx& ctx, F32Cube o, ConstF32Cube q, ConstF32Cube k_nope,
                       ConstF32Mat k_shared, ConstF32Cube v, ConstI32Vec cu_seqlens, float scale) {
  HWY_DYNAMIC_DISPATCH(expanded)(ctx, o, q, k_nope, k_shared, v, cu_seqlens, scale);
}

}  // namespace tandem
#endif
