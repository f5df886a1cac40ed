// kda_bwd.cpp — gradients of the KDA recurrence.   Contract: ops/kda.h   Oracle: ops/ref/kda_ref.h
// Math: kimi-k3.md 13, first bullet.
//
// A work item is one (sequence, head). For each block of kKdaCheckpointRows rows, last block first:
//   1. from the checkpoint, run the forward sweep again for the residuals r and writes u;
// and then for each group of state columns, small enough that its states of all rows stay in L1:
//   2. rebuild the decayed states S~ of the rows, transposed to [V, K] (k contiguous): two
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

#include "backends/cpu/kda.h"
#include "backends/cpu/kda_bwd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

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
      copy_row(block.checkpoint + key * values + col, cols, scratch.state + key * stride);
    }
    x.v = v.from(0, col);
    with_vec_count(cols, [&](auto nv) HWY_ATTR {
      recompute_cols<decltype(nv)::value>({scratch.state, stride}, x, scratch.r + col,
                                          scratch.u + col, call.value_stride(), cols);
    });
  }
}

/// to[v * stride + k] = from[k * row + v] for v < values.
void transpose(const float* from, std::int64_t row, std::int64_t keys, std::int64_t values,
               float* to, std::int64_t stride) {
  std::int64_t whole_keys = 0;
  const std::int64_t whole_values = values / 4 * 4;
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> pairs;
  for (; whole_keys + 4 <= keys; whole_keys += 4) {
    for (std::int64_t v = 0; v < whole_values; v += 4) {
      const float* in = from + whole_keys * row + v;
      float* out = to + v * stride + whole_keys;
      const auto a = hn::LoadU(d, in);
      const auto b = hn::LoadU(d, in + row);
      const auto c = hn::LoadU(d, in + 2 * row);
      const auto e = hn::LoadU(d, in + 3 * row);
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
      to[v * stride + k] = from[k * row + v];
    }
  }
}

/// decayed[t] = S~ of every row of the block on the group's columns, [V, K].
void rebuild_states(const BwdCall& call, const RowBlock& block, ColGroup cols,
                    const BwdScratch& scratch) {
  const FloatTag d;
  const std::int64_t kp = call.key_stride();
  const std::int64_t width = cols.end - cols.begin;
  std::fill(scratch.start, scratch.start + width * kp, 0.0F);
  transpose(block.checkpoint + cols.begin, call.values(), call.keys(),
            std::min(width, call.values() - cols.begin), scratch.start, kp);
  // Four columns at a time: each is a chain of dependent operations over the rows.
  for (std::int64_t v = 0; v < width; v += 4) {
    for (std::int64_t c = 0; c < kp; c += kLanes) {
      FloatVec s[4];
      for (std::int64_t i = 0; i < 4; ++i) {
        s[i] = hn::Load(d, scratch.start + (v + i) * kp + c);
      }
      for (std::int64_t t = 0; t < block.count; ++t) {
        const FloatVec e = hn::Load(d, scratch.e + t * kp + c);
        const FloatVec k = hn::Load(d, scratch.k + t * kp + c);
        float* out = scratch.decayed + (t * width + v) * kp + c;
        const float* u = scratch.u + t * call.value_stride() + cols.begin + v;
        for (std::int64_t i = 0; i < 4; ++i) {
          s[i] = hn::Mul(s[i], e);
          hn::Store(s[i], d, out + i * kp);
          s[i] = hn::MulAdd(k, hn::Set(d, u[i]), s[i]);
        }
      }
    }
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

void load_block(const BwdCall& call, const RowBlock& block, const BwdScratch& scratch) {
  const std::int64_t kp = call.key_stride();
  copy_rows(head_rows(call.in.q, block.t, block.head), block.count, call.keys(), scratch.q, kp);
  copy_rows(head_rows(call.in.k, block.t, block.head), block.count, call.keys(), scratch.k, kp);
  copy_rows(head_rows(call.d_o, block.t, block.head), block.count, call.values(), scratch.d_o,
            call.value_stride());
  exp_rows(head_rows(call.in.g, block.t, block.head), block.count, call.keys(), scratch.e);
  for (float* sum : {scratch.d_q, scratch.d_k, scratch.d_g}) {
    std::fill(sum, sum + block.count * kp, 0.0F);
  }
  std::fill(scratch.d_beta, scratch.d_beta + block.count, 0.0F);
}

void store_block(const BwdCall& call, const RowBlock& block, const BwdScratch& scratch) {
  const std::int64_t kp = call.key_stride();
  for (std::int64_t row = 0; row < block.count; ++row) {
    const std::int64_t t = block.t + row;
    const auto store = [&](const float* sums, const F32Cube& out) {
      copy_row(sums + row * kp, call.keys(), &out(t, block.head, 0));
    };
    store(scratch.d_q, call.grads.d_q);
    store(scratch.d_k, call.grads.d_k);
    store(scratch.d_g, call.grads.d_g);
    call.grads.d_beta(t, block.head) = scratch.d_beta[row];
  }
}

/// One row of one column group; d_v is complete after it.
void row_gradients(const BwdCall& call, const RowBlock& block, ColGroup cols,
                   const BwdScratch& scratch, std::int64_t row) {
  if (call.key_stride() == kKeyVecs * kLanes) {
    fused_gradients<kKeyVecs>(call, block, cols, scratch, row);
  } else {
    split_gradients(call, block, cols, scratch, row);
  }
  copy_row(scratch.r_bar + cols.begin, std::min(cols.end, call.values()) - cols.begin,
           &call.grads.d_v(block.t + row, block.head, 0) + cols.begin);
}

void run_block(const BwdCall& call, const RowBlock& block, const BwdScratch& scratch) {
  load_block(call, block, scratch);
  recompute(call, block, scratch);
  const std::int64_t end = round_up(call.values(), 4);
  for (std::int64_t col = 0; col < end; col += call.group_cols()) {
    const ColGroup cols{col, std::min(end, col + call.group_cols())};
    rebuild_states(call, block, cols, scratch);
    for (std::int64_t row = block.count - 1; row >= 0; --row) {
      row_gradients(call, block, cols, scratch, row);
    }
  }
  store_block(call, block, scratch);
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
  const std::int64_t per_thread = round_up(BwdScratch::floats(call), 16);
  const std::span<float> all = ctx.workspace->take<float>(per_thread * ctx.pool->num_threads());
  std::fill(all.begin(), all.end(), 0.0F);  // the padding stays 0 from here on
  ctx.pool->parallel_for(num_seqs * call.heads(), [&](std::int64_t item, int thread) HWY_ATTR {
    run_item(call, item / call.heads(), item % call.heads(),
             BwdScratch(all.data() + thread * per_thread, call));
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
