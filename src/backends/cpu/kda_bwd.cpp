// kda_bwd.cpp — gradients of the KDA recurrence.   Contract: ops/kda.h   Oracle: ops/ref/kda_ref.h
// Math: kimi-k3.md 13, first bullet.
//
// A work item is one (sequence, head). For each block of kKdaCheckpointRows rows, last block first:
//   1. from the checkpoint, run the forward sweep again for the residuals r and writes u;
//   2. rebuild the decayed states S~ of the block, transposed to [V, K] (k contiguous): two
//      operations an element, since u is known;
//   3. go back over the rows with the state gradient, also [V, K]. In this layout the sums over v
//      (d_q, d_k, d_g) are plain vector accumulations; only u_bar, one number a column, needs a sum
//      across lanes.
// Traffic and measurements: docs/kernels/kda.md.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/kda_bwd.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <span>

#include "backends/cpu/kda-inl.h"
#include "backends/cpu/kda.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kRows = kKdaCheckpointRows;
// Vectors of keys that one pass over the columns carries; 4 sums each must stay in registers.
constexpr std::int64_t kKeyVecs = kLanes >= 16 ? 2 : 1;

struct BwdCall {
  const KdaGrads& grads;
  ConstF32Cube d_o;
  const KdaInputs& in;
  const SeqBatch& seqs;
  const float* checkpoints;
  const std::int64_t* first_checkpoint;  // [B]

  [[nodiscard]] std::int64_t heads() const { return d_o.size(1); }
  [[nodiscard]] std::int64_t keys() const { return in.q.size(2); }
  [[nodiscard]] std::int64_t values() const { return d_o.size(2); }
  [[nodiscard]] std::int64_t key_stride() const { return round_up(keys(), kLanes); }
  // Whole vectors, and whole groups of 4 columns for sum_lanes_4.
  [[nodiscard]] std::int64_t value_stride() const {
    return round_up(values(), std::max<std::int64_t>(kLanes, 4));
  }
};

/// Scratch of a thread. Rows are padded with zeros, so loops run over whole vectors.
struct BwdScratch {
  float* q;        // [kRows, KP], KP = key_stride
  float* k;        // [kRows, KP]
  float* e;        // [kRows, KP]
  float* d_o;      // [kRows, VP], VP = value_stride
  float* r;        // [kRows, VP]
  float* u;        // [kRows, VP]
  float* r_bar;    // [VP]
  float* state;    // [K, VP] as column blocks: the forward layout
  float* start;    // [VP, KP] the checkpoint, transposed
  float* decayed;  // [kRows, VP, KP]
  float* d_state;  // [VP, KP]

  BwdScratch(float* base, std::int64_t kp, std::int64_t vp)
      : q(base),
        k(q + kRows * kp),
        e(k + kRows * kp),
        d_o(e + kRows * kp),
        r(d_o + kRows * vp),
        u(r + kRows * vp),
        r_bar(u + kRows * vp),
        state(r_bar + vp),
        start(state + kp * vp),
        decayed(start + kp * vp),
        d_state(decayed + kRows * kp * vp) {}
  static std::int64_t floats(std::int64_t kp, std::int64_t vp) {
    return 3 * kRows * (kp + vp) + vp + (kRows + 3) * kp * vp;
  }
};

/// One block of rows of one (sequence, head).
struct RowBlock {
  std::int64_t t;  // first row in the batch
  std::int64_t count;
  std::int64_t head;
  const float* checkpoint;  // [K, V]
};

/// Residuals r and writes u of the block on `cols` columns from `col`.
template <std::size_t NV>
void recompute_cols(StateBlock s, const TokenRows& x, float* r_rows, float* u_rows,
                    std::int64_t row_stride, std::int64_t cols) {
  FloatVec u[NV];
  FloatVec unread[NV];
  FloatVec r[NV];
  load_cols<NV>(x.v.row(0), cols, r);
  load_cols<NV>(x.v.row(0), cols, u);
  sweep_state<NV, false, false, true>(s, x.keys, {}, {x.e.row(0), x.k.row(0)}, u, unread, r);
  for (std::int64_t t = 0; t < x.count; ++t) {
    scale_residual<NV>(*x.beta.row(t), r, u);
    store_cols<NV>(r, r_rows + t * row_stride, round_up(cols, kLanes));
    store_cols<NV>(u, u_rows + t * row_stride, round_up(cols, kLanes));
    if (t + 1 < x.count) {
      load_cols<NV>(x.v.row(t + 1), cols, r);
      sweep_state<NV, true, false, true>(s, x.keys, {x.k.row(t), nullptr},
                                         {x.e.row(t + 1), x.k.row(t + 1)}, u, unread, r);
    }
  }
}

void recompute(const BwdCall& call, const RowBlock& block, const BwdScratch& scratch) {
  const std::int64_t keys = call.keys();
  const std::int64_t values = call.values();
  const std::int64_t kp = call.key_stride();
  TokenRows x{.q = {},
              .k = {scratch.k, kp},
              .v = head_rows(call.in.v, block.t, block.head),
              .e = {scratch.e, kp},
              .beta = head_rows(call.in.beta, block.t, block.head),
              .count = block.count,
              .keys = keys};
  const HeadRows v = x.v;
  for (std::int64_t col = 0; col < values; col += kStateCols) {
    const std::int64_t cols = std::min(kStateCols, values - col);
    const std::int64_t stride = round_up(cols, kLanes);
    std::fill(scratch.state, scratch.state + keys * stride, 0.0F);
    for (std::int64_t key = 0; key < keys; ++key) {
      const float* from = block.checkpoint + key * values + col;
      std::copy(from, from + cols, scratch.state + key * stride);
    }
    x.v = v.from(0, col);
    with_vec_count(cols, [&](auto nv) HWY_ATTR {
      recompute_cols<decltype(nv)::value>({scratch.state, stride}, x, scratch.r + col,
                                          scratch.u + col, call.value_stride(), cols);
    });
  }
}

/// to[v * stride + k] = from[k, v].
void transpose(const float* from, std::int64_t keys, std::int64_t values, float* to,
               std::int64_t stride) {
  std::int64_t whole_keys = 0;
  const std::int64_t whole_values = values / 4 * 4;
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> pairs;
  for (; whole_keys + 4 <= keys; whole_keys += 4) {
    for (std::int64_t v = 0; v < whole_values; v += 4) {
      const float* in = from + whole_keys * values + v;
      float* out = to + v * stride + whole_keys;
      const auto a = hn::LoadU(d, in);
      const auto b = hn::LoadU(d, in + values);
      const auto c = hn::LoadU(d, in + 2 * values);
      const auto e = hn::LoadU(d, in + 3 * values);
      const auto ab_low = hn::BitCast(pairs, hn::InterleaveLower(d, a, b));
      const auto ab_high = hn::BitCast(pairs, hn::InterleaveUpper(d, a, b));
      const auto ce_low = hn::BitCast(pairs, hn::InterleaveLower(d, c, e));
      const auto ce_high = hn::BitCast(pairs, hn::InterleaveUpper(d, c, e));
      hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, ab_low, ce_low)), d, out);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, ab_low, ce_low)), d, out + stride);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, ab_high, ce_high)), d, out + 2 * stride);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, ab_high, ce_high)), d, out + 3 * stride);
    }
  }
#endif
  for (std::int64_t k = 0; k < keys; ++k) {
    for (std::int64_t v = k < whole_keys ? whole_values : 0; v < values; ++v) {
      to[v * stride + k] = from[k * values + v];
    }
  }
}

/// decayed[t] = S~ of every row of the block, [V, K].
void rebuild_states(const BwdCall& call, const RowBlock& block, const BwdScratch& scratch) {
  const FloatTag d;
  const std::int64_t kp = call.key_stride();
  const std::int64_t vp = call.value_stride();
  transpose(block.checkpoint, call.keys(), call.values(), scratch.start, kp);
  // Four columns at a time: each is a chain of dependent operations over the rows.
  for (std::int64_t v = 0; v < vp; v += 4) {
    for (std::int64_t c = 0; c < kp; c += kLanes) {
      FloatVec s[4];
      for (std::int64_t i = 0; i < 4; ++i) {
        s[i] = hn::Load(d, scratch.start + (v + i) * kp + c);
      }
      for (std::int64_t t = 0; t < block.count; ++t) {
        const FloatVec e = hn::Load(d, scratch.e + t * kp + c);
        const FloatVec k = hn::Load(d, scratch.k + t * kp + c);
        float* out = scratch.decayed + (t * vp + v) * kp + c;
        const float* u = scratch.u + t * vp + v;
        for (std::int64_t i = 0; i < 4; ++i) {
          s[i] = hn::Mul(s[i], e);
          hn::Store(s[i], d, out + i * kp);
          s[i] = hn::MulAdd(k, hn::Set(d, u[i]), s[i]);
        }
      }
    }
  }
}

/// d_state += q d_o^T, then r_bar receives u_bar = d_state^T k.
void read_gradient(const BwdCall& call, const BwdScratch& scratch, std::int64_t row) {
  const FloatTag d;
  const std::int64_t kp = call.key_stride();
  const std::int64_t vp = call.value_stride();
  const float* q = scratch.q + row * kp;
  const float* k = scratch.k + row * kp;
  const float* d_o = scratch.d_o + row * vp;
  for (std::int64_t v = 0; v < vp; v += 4) {
    FloatVec dot[4];
    FloatVec grad[4];
    for (std::int64_t i = 0; i < 4; ++i) {
      dot[i] = hn::Zero(d);
      grad[i] = hn::Set(d, d_o[v + i]);
    }
    for (std::int64_t c = 0; c < kp; c += kLanes) {
      const FloatVec qc = hn::Load(d, q + c);
      const FloatVec kc = hn::Load(d, k + c);
      for (std::int64_t i = 0; i < 4; ++i) {
        float* at = scratch.d_state + (v + i) * kp + c;
        const FloatVec s = hn::MulAdd(qc, grad[i], hn::Load(d, at));
        hn::Store(s, d, at);
        dot[i] = hn::MulAdd(s, kc, dot[i]);
      }
    }
    sum_lanes_4(dot[0], dot[1], dot[2], dot[3], scratch.r_bar + v);
  }
}

/// From u_bar: d_beta, r_bar = beta u_bar = d_v. Returns u . d_o. Works on 4 lanes, the size in
/// which read_gradient has just stored u_bar: a wider load would wait for those stores to reach the
/// cache.
float write_gradient(const BwdCall& call, const RowBlock& block, const BwdScratch& scratch,
                     std::int64_t row) {
  const hn::CappedTag<float, 4> d;
  constexpr auto kStep = static_cast<std::int64_t>(hn::MaxLanes(hn::CappedTag<float, 4>()));
  const std::int64_t vp = call.value_stride();
  const std::int64_t t = block.t + row;
  const auto beta = hn::Set(d, call.in.beta(t, block.head));
  auto d_beta = hn::Zero(d);
  auto read = hn::Zero(d);
  for (std::int64_t v = 0; v < vp; v += kStep) {
    const auto u_bar = hn::Load(d, scratch.r_bar + v);
    d_beta = hn::MulAdd(u_bar, hn::Load(d, scratch.r + row * vp + v), d_beta);
    read = hn::MulAdd(hn::Load(d, scratch.u + row * vp + v),
                      hn::Load(d, scratch.d_o + row * vp + v), read);
    hn::Store(hn::Mul(beta, u_bar), d, scratch.r_bar + v);
  }
  call.grads.d_beta(t, block.head) = hn::GetLane(hn::SumOfLanes(d, d_beta));
  return hn::GetLane(hn::SumOfLanes(d, read));
}

/// d_q, d_k, d_g of the row on NC vectors of keys from `c`, and d_state <- e (d_state - k r_bar^T).
template <std::int64_t NC>
void key_gradients(const BwdCall& call, const RowBlock& block, const BwdScratch& scratch,
                   std::int64_t row, std::int64_t c, float read) {
  const FloatTag d;
  const std::int64_t kp = call.key_stride();
  const std::int64_t vp = call.value_stride();
  constexpr std::size_t kCount = usize(NC);
  FloatVec key[kCount];
  FloatVec decay[kCount];
  FloatVec d_q[kCount];
  FloatVec d_k[kCount];
  FloatVec d_k_minus[kCount];
  FloatVec d_g[kCount];
  for (std::int64_t i = 0; i < NC; ++i) {
    key[i] = hn::Load(d, scratch.k + row * kp + c + i * kLanes);
    decay[i] = hn::Load(d, scratch.e + row * kp + c + i * kLanes);
    d_q[i] = hn::Mul(key[i], hn::Set(d, read));  // S q_bar includes this row's own write
    d_k[i] = d_k_minus[i] = d_g[i] = hn::Zero(d);
  }
  const float* decayed = scratch.decayed + row * vp * kp + c;
  for (std::int64_t v = 0; v < call.values(); ++v) {
    const FloatVec d_o = hn::Set(d, scratch.d_o[row * vp + v]);
    const FloatVec u = hn::Set(d, scratch.u[row * vp + v]);
    const FloatVec r_bar = hn::Set(d, scratch.r_bar[v]);
    for (std::int64_t i = 0; i < NC; ++i) {
      float* at = scratch.d_state + v * kp + c + i * kLanes;
      const FloatVec grad = hn::Load(d, at);
      const FloatVec s = hn::Load(d, decayed + v * kp + i * kLanes);
      d_q[i] = hn::MulAdd(s, d_o, d_q[i]);
      d_k[i] = hn::MulAdd(grad, u, d_k[i]);
      d_k_minus[i] = hn::MulAdd(s, r_bar, d_k_minus[i]);
      const FloatVec z = hn::NegMulAdd(key[i], r_bar, grad);
      d_g[i] = hn::MulAdd(z, s, d_g[i]);
      hn::Store(hn::Mul(decay[i], z), d, at);
    }
  }
  const std::int64_t t = block.t + row;
  for (std::int64_t i = 0; i < NC; ++i) {
    const std::int64_t at = c + i * kLanes;
    const std::int64_t n = call.keys() - at;
    store_first(d_q[i], &call.grads.d_q(t, block.head, 0) + at, n);
    store_first(hn::Sub(d_k[i], d_k_minus[i]), &call.grads.d_k(t, block.head, 0) + at, n);
    store_first(d_g[i], &call.grads.d_g(t, block.head, 0) + at, n);
  }
}

void copy_rows(HeadRows from, std::int64_t count, std::int64_t cols, float* to,
               std::int64_t stride) {
  const FloatTag d;
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t c = 0; c < cols; c += kLanes) {
      hn::StoreU(load_first(from.row(t) + c, cols - c), d, to + t * stride + c);
    }
  }
}

void run_block(const BwdCall& call, const RowBlock& block, const BwdScratch& scratch) {
  const std::int64_t kp = call.key_stride();
  copy_rows(head_rows(call.in.q, block.t, block.head), block.count, call.keys(), scratch.q, kp);
  copy_rows(head_rows(call.in.k, block.t, block.head), block.count, call.keys(), scratch.k, kp);
  copy_rows(head_rows(call.d_o, block.t, block.head), block.count, call.values(), scratch.d_o,
            call.value_stride());
  exp_rows(head_rows(call.in.g, block.t, block.head), block.count, call.keys(), scratch.e);
  recompute(call, block, scratch);
  rebuild_states(call, block, scratch);
  for (std::int64_t row = block.count - 1; row >= 0; --row) {
    read_gradient(call, scratch, row);
    const float read = write_gradient(call, block, scratch, row);
    std::int64_t c = 0;
    for (; c + kKeyVecs * kLanes <= kp; c += kKeyVecs * kLanes) {
      key_gradients<kKeyVecs>(call, block, scratch, row, c, read);
    }
    for (; c < kp; c += kLanes) {
      key_gradients<1>(call, block, scratch, row, c, read);
    }
    std::copy(scratch.r_bar, scratch.r_bar + call.values(),
              &call.grads.d_v(block.t + row, block.head, 0));
  }
}

void run_item(const BwdCall& call, std::int64_t seq, std::int64_t head, const BwdScratch& scratch) {
  const std::int64_t kp = call.key_stride();
  std::fill(scratch.d_state, scratch.d_state + call.value_stride() * kp, 0.0F);
  const std::int64_t length = call.seqs.length(seq);
  const std::int64_t size = call.keys() * call.values();
  for (std::int64_t i = (length + kRows - 1) / kRows - 1; i >= 0; --i) {
    const std::int64_t index = (call.first_checkpoint[seq] + i) * call.heads() + head;
    run_block(call,
              {.t = call.seqs.begin(seq) + i * kRows,
               .count = std::min(kRows, length - i * kRows),
               .head = head,
               .checkpoint = call.checkpoints + index * size},
              scratch);
  }
}

void recurrent_bwd(const ExecCtx& ctx, const KdaGrads& grads, ConstF32Cube d_o, const KdaInputs& in,
                   const SeqBatch& seqs, const float* checkpoints) {
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t num_seqs = seqs.num_seqs();
  std::int64_t* first = ctx.workspace->take<std::int64_t>(num_seqs + 1).data();
  first[0] = 0;
  for (std::int64_t b = 0; b < num_seqs; ++b) {
    first[b + 1] = first[b] + (seqs.length(b) + kRows - 1) / kRows;
  }
  const BwdCall call{grads, d_o, in, seqs, checkpoints, first};
  const std::int64_t kp = call.key_stride();
  const std::int64_t vp = call.value_stride();
  const std::int64_t per_thread = round_up(BwdScratch::floats(kp, vp), 16);
  const std::span<float> all = ctx.workspace->take<float>(per_thread * ctx.pool->num_threads());
  std::fill(all.begin(), all.end(), 0.0F);  // the padding stays 0 from here on
  ctx.pool->parallel_for(num_seqs * call.heads(), [&](std::int64_t item, int thread) HWY_ATTR {
    run_item(call, item / call.heads(), item % call.heads(),
             BwdScratch(all.data() + thread * per_thread, kp, vp));
  });
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(recurrent_bwd);

void cpu::kda_recurrent_bwd(const ExecCtx& ctx, const KdaGrads& grads, ConstF32Cube d_o,
                            const KdaInputs& in, const SeqBatch& seqs, const float* checkpoints) {
  HWY_DYNAMIC_DISPATCH(recurrent_bwd)(ctx, grads, d_o, in, seqs, checkpoints);
}

}  // namespace tandem
#endif
