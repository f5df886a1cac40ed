// kda_chunk.cpp — the chunkwise form of KDA.   Contract: ops/kda.h   Oracle: ops/ref/kda_ref.h
// Math: kimi-k3.md 4.7, chunks of 64 rows in sub-blocks of 16.
//
// Every decay e^(G_i - G_j) is formed as a product of the rows' factors e^g <= 1, never from a sum
// of logs: nothing overflows for any g <= 0, the relative error grows with i - j only (a difference
// of two large sums would lose |G| eps), and no exponential is taken besides e^g itself.
//   within a sub-block: w = k_j, then w *= e^g_i row by row;
//   across sub-blocks: left factor from the start of i's sub-block, right factor up to it.
// The state S_0 is known when a chunk is reached, so instead of T, U, W the triangular system is
// solved for the deltas at once: delta = T diag(beta) (V - (K e^G) S_0), by forward substitution.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/kda_chunk.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>

#include "backends/cpu/attn_tiles-inl.h"
#include "backends/cpu/kda-inl.h"
#include "backends/cpu/kda.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kChunk = kKeyTile;
constexpr std::int64_t kSub = 16;
static_assert(kChunk == 64);

struct ChunkScratch {
  std::int64_t kp;  // K and V padded to whole vectors
  std::int64_t vp;
  float* e;       // [kChunk, kp] e^g
  float* k_left;  // [kSub, kp] k e^(G_i - G_start of the sub-block)
  float* q_left;  // [kSub, kp]
  float* k_in;    // [kChunk, kp] -k e^G_i
  float* q_in;    // [kChunk, kp] q e^G_i
  float* k_out;   // [kChunk, kp] k e^(G_now - G_j)
  float* carry;   // [kp] e^G_now
  float* total;   // [kp] decay of one sub-block
  float* a;       // [kChunk, kChunk] -beta_i k_i . k_j e^(G_i - G_j), j < i
  float* p;       // [kChunk, kChunk] q_i . k_j e^(G_i - G_j), j <= i
  float* k_t;     // [kp, kChunk] k_out transposed
  float* delta;   // [kChunk, vp]
  float* o;       // [kChunk, vp]
  float* state;   // [K, vp]

  ChunkScratch(float* base, std::int64_t keys, std::int64_t values)
      : kp(round_up(keys, kLanes)), vp(round_up(values, kLanes)) {
    for (float** part : {&e, &k_in, &q_in, &k_out, &k_t}) {
      *part = base;
      base += kChunk * kp;
    }
    for (float** part : {&k_left, &q_left}) {
      *part = base;
      base += kSub * kp;
    }
    for (float** part : {&a, &p}) {
      *part = base;
      base += kChunk * kChunk;
    }
    for (float** part : {&delta, &o}) {
      *part = base;
      base += kChunk * vp;
    }
    carry = base;
    total = carry + kp;
    state = total + kp;
  }
  static std::int64_t floats(std::int64_t keys, std::int64_t values) {
    const std::int64_t kp = round_up(keys, kLanes);
    const std::int64_t vp = round_up(values, kLanes);
    return (5 * kChunk + 2 * kSub + 2) * kp + 2 * kChunk * kChunk + 2 * kChunk * vp + keys * vp;
  }
};

/// The chunk's rows of one head.
struct ChunkRows {
  HeadRows q, k, g, v, beta;
  std::int64_t count;
  std::int64_t keys;
  std::int64_t values;
};

HWY_INLINE FloatVec key_vec(const ChunkRows& x, HeadRows rows, std::int64_t i, std::int64_t c) {
  return load_first(rows.row(i) + c, x.keys - c);
}

/// Left factors of the sub-block from `first`, and what its rows read from and give to S_0.
void left_factors(const ChunkRows& x, const ChunkScratch& s, std::int64_t first,
                  std::int64_t rows) {
  const FloatTag d;
  for (std::int64_t c = 0; c < s.kp; c += kLanes) {
    const FloatVec carry = hn::Load(d, s.carry + c);
    FloatVec decay = hn::Set(d, 1.0F);
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t row = (first + i) * s.kp + c;
      decay = hn::Mul(decay, hn::Load(d, s.e + row));
      const FloatVec k = hn::Mul(key_vec(x, x.k, first + i, c), decay);
      const FloatVec q = hn::Mul(key_vec(x, x.q, first + i, c), decay);
      hn::Store(k, d, s.k_left + i * s.kp + c);
      hn::Store(q, d, s.q_left + i * s.kp + c);
      hn::Store(hn::Neg(hn::Mul(k, carry)), d, s.k_in + row);
      hn::Store(hn::Mul(q, carry), d, s.q_in + row);
    }
    hn::Store(decay, d, s.total + c);
    hn::Store(hn::Mul(carry, decay), d, s.carry + c);
  }
}

/// A and P inside the sub-block. w: scratch of kp floats.
void diagonal(const ChunkRows& x, const ChunkScratch& s, std::int64_t first, std::int64_t rows,
              float* w) {
  const FloatTag d;
  for (std::int64_t j = first; j < first + rows; ++j) {
    for (std::int64_t c = 0; c < s.kp; c += kLanes) {
      hn::Store(key_vec(x, x.k, j, c), d, w + c);
    }
    for (std::int64_t i = j; i < first + rows; ++i) {
      FloatVec k_dot = hn::Zero(d);
      FloatVec q_dot = hn::Zero(d);
      for (std::int64_t c = 0; c < s.kp; c += kLanes) {
        FloatVec right = hn::Load(d, w + c);
        if (i > j) {
          right = hn::Mul(right, hn::Load(d, s.e + i * s.kp + c));
          hn::Store(right, d, w + c);
        }
        k_dot = hn::MulAdd(key_vec(x, x.k, i, c), right, k_dot);
        q_dot = hn::MulAdd(key_vec(x, x.q, i, c), right, q_dot);
      }
      float sums[4];
      sum_lanes_4(k_dot, q_dot, k_dot, q_dot, sums);
      s.a[i * kChunk + j] = sums[0];
      s.p[i * kChunk + j] = sums[1];
    }
  }
}

/// k_out of every row so far moves to the end of the sub-block; its own rows join.
void right_factors(const ChunkRows& x, const ChunkScratch& s, std::int64_t first,
                   std::int64_t rows) {
  const FloatTag d;
  for (std::int64_t c = 0; c < s.kp; c += kLanes) {
    const FloatVec total = hn::Load(d, s.total + c);
    for (std::int64_t j = 0; j < first; ++j) {
      float* at = s.k_out + j * s.kp + c;
      hn::Store(hn::Mul(hn::Load(d, at), total), d, at);
    }
    FloatVec decay = hn::Set(d, 1.0F);
    for (std::int64_t j = first + rows - 1; j >= first; --j) {
      hn::Store(hn::Mul(key_vec(x, x.k, j, c), decay), d, s.k_out + j * s.kp + c);
      decay = hn::Mul(decay, hn::Load(d, s.e + j * s.kp + c));
    }
  }
}

void build_matrices(const ChunkRows& x, const ChunkScratch& s) {
  std::fill(s.carry, s.carry + s.kp, 1.0F);
  exp_rows(x.g, x.count, x.keys, s.e);
  const float* right[kChunk];
  for (std::int64_t j = 0; j < kChunk; ++j) {
    right[j] = s.k_out + j * s.kp;
  }
  for (std::int64_t first = 0; first < x.count; first += kSub) {
    const std::int64_t rows = std::min(kSub, x.count - first);
    left_factors(x, s, first, rows);
    if (first > 0) {
      dot_rows(s.k_left, s.kp, rows, right, first, s.kp, s.a + first * kChunk);
      dot_rows(s.q_left, s.kp, rows, right, first, s.kp, s.p + first * kChunk);
    }
    diagonal(x, s, first, rows, s.k_t);  // k_t is free until the chunk's end
    for (std::int64_t i = first; i < first + rows; ++i) {
      const float minus_beta = -*x.beta.row(i);
      for (std::int64_t j = 0; j < i; ++j) {
        s.a[i * kChunk + j] *= minus_beta;
      }
    }
    right_factors(x, s, first, rows);
  }
}

/// delta = T diag(beta) (V - (K e^G) S_0);   o = (Q e^G) S_0 + P delta.
void solve_deltas(const ChunkRows& x, const ChunkScratch& s) {
  const float* state_rows[kChunk];
  std::int64_t valid[kChunk];
  for (std::int64_t i = 0; i < x.count; ++i) {
    copy_padded(x.v.row(i), x.values, s.delta + i * s.vp);
  }
  std::fill(s.o, s.o + x.count * s.vp, 0.0F);
  for (std::int64_t k0 = 0; k0 < x.keys; k0 += kChunk) {
    const std::int64_t keys = std::min(kChunk, x.keys - k0);
    for (std::int64_t k = 0; k < keys; ++k) {
      state_rows[k] = s.state + (k0 + k) * s.vp;
    }
    std::fill(valid, valid + x.count, keys);
    sum_rows(s.delta, s.vp, x.count, s.k_in + k0, s.kp, state_rows, valid, s.vp);
    sum_rows(s.o, s.vp, x.count, s.q_in + k0, s.kp, state_rows, valid, s.vp);
  }
  const float* deltas[kChunk];
  for (std::int64_t i = 0; i < x.count; ++i) {
    deltas[i] = s.delta + i * s.vp;
    scale_row(s.delta + i * s.vp, s.vp, *x.beta.row(i));
  }
  for (std::int64_t first = 0; first < x.count; first += kSub) {
    const std::int64_t rows = std::min(kSub, x.count - first);
    std::fill(valid, valid + rows, first);
    sum_rows(s.delta + first * s.vp, s.vp, rows, s.a + first * kChunk, kChunk, deltas, valid, s.vp);
    for (std::int64_t i = first + 1; i < first + rows; ++i) {
      const std::int64_t before = i - first;
      sum_rows(s.delta + i * s.vp, s.vp, 1, s.a + i * kChunk + first, kChunk, deltas + first,
               &before, s.vp);
    }
  }
  for (std::int64_t i = 0; i < x.count; ++i) {
    valid[i] = i + 1;
  }
  sum_rows(s.o, s.vp, x.count, s.p, kChunk, deltas, valid, s.vp);
}

/// S <- diag(e^G_C) S_0 + k_out^T delta.
void advance_state(const ChunkRows& x, const ChunkScratch& s) {
  const float* deltas[kChunk];
  for (std::int64_t j = 0; j < x.count; ++j) {
    deltas[j] = s.delta + j * s.vp;
    for (std::int64_t k = 0; k < x.keys; ++k) {
      s.k_t[k * kChunk + j] = s.k_out[j * s.kp + k];
    }
  }
  for (std::int64_t k = 0; k < x.keys; ++k) {
    scale_row(s.state + k * s.vp, s.vp, s.carry[k]);
  }
  for (std::int64_t k = 0; k < x.keys; k += kSub) {
    std::int64_t valid[kSub];
    std::fill(valid, valid + kSub, x.count);
    sum_rows(s.state + k * s.vp, s.vp, std::min(kSub, x.keys - k), s.k_t + k * kChunk, kChunk,
             deltas, valid, s.vp);
  }
}

struct ChunkCall {
  F32Cube o;
  const KdaInputs& in;
  const KdaStatePool& pool;
  const SeqBatch& seqs;
};

void run_head(const ChunkCall& call, std::int64_t b, std::int64_t h, const ChunkScratch& s) {
  const std::int64_t keys = call.in.q.size(2);
  const std::int64_t values = call.in.v.size(2);
  const bool keeps = call.seqs.keeps_state();
  const std::int64_t begin = call.seqs.begin(b);
  const std::int64_t end = begin + call.seqs.length(b);
  if (keeps && call.seqs.state_slots(b) < 0) {
    for (std::int64_t t = begin; t < end; ++t) {
      std::fill(&call.o(t, h, 0), &call.o(t, h, 0) + values, 0.0F);
    }
    return;
  }
  float* pooled = keeps ? call.pool.state(call.seqs.state_slots(b), h) : nullptr;
  std::fill(s.state, s.state + keys * s.vp, 0.0F);
  for (std::int64_t k = 0; keeps && k < keys; ++k) {
    copy_padded(pooled + k * values, values, s.state + k * s.vp);
  }
  for (std::int64_t t = begin; t < end; t += kChunk) {
    const ChunkRows x{.q = head_rows(call.in.q, t, h),
                      .k = head_rows(call.in.k, t, h),
                      .g = head_rows(call.in.g, t, h),
                      .v = head_rows(call.in.v, t, h),
                      .beta = head_rows(call.in.beta, t, h),
                      .count = std::min(kChunk, end - t),
                      .keys = keys,
                      .values = values};
    build_matrices(x, s);
    solve_deltas(x, s);
    advance_state(x, s);
    for (std::int64_t i = 0; i < x.count; ++i) {
      copy_row(s.o + i * s.vp, values, &call.o(t + i, h, 0));
    }
  }
  for (std::int64_t k = 0; keeps && k < keys; ++k) {
    copy_row(s.state + k * s.vp, values, pooled + k * values);
  }
}

void chunk(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
           const SeqBatch& seqs) {
  const ArenaScope scope(*ctx.workspace);
  const ChunkCall call{o, in, pool, seqs};
  const std::int64_t keys = in.q.size(2);
  const std::int64_t values = in.v.size(2);
  const std::int64_t per_thread = round_up(ChunkScratch::floats(keys, values), 16);
  float* base = ctx.workspace->take<float>(per_thread * ctx.pool->num_threads()).data();
  ctx.pool->parallel_for(seqs.num_seqs() * o.size(1), [&](std::int64_t item, int thread) HWY_ATTR {
    run_head(call, item / o.size(1), item % o.size(1),
             ChunkScratch(base + thread * per_thread, keys, values));
  });
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(chunk);

void cpu::kda_chunk(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
                    const SeqBatch& seqs) {
  HWY_DYNAMIC_DISPATCH(chunk)(ctx, o, in, pool, seqs);
}

}  // namespace tandem
#endif
