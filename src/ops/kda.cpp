#include "ops/kda.h"

#include <algorithm>

#include "ops/check_seqs.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem {
namespace {

/// Rows may lie apart (column slices of a wider matrix) but the channels of a head are contiguous.
template <typename T>
void check_cube(const TensorView<T, 3>& x, std::int64_t rows, std::int64_t heads,
                std::int64_t channels) {
  TDM_CHECK(x.size(0) == rows && x.size(1) == heads && x.size(2) == channels, x.size(0), x.size(1),
            x.size(2), rows, heads, channels);
  TDM_CHECK(channels <= 1 || x.stride(2) == 1, x.stride(2));
}

void check_inputs(const KdaInputs& in, std::int64_t rows, std::int64_t heads, std::int64_t values) {
  const std::int64_t keys = in.q.size(2);
  TDM_CHECK(keys > 0 && values > 0 && heads > 0, keys, values, heads);
  check_cube(in.q, rows, heads, keys);
  check_cube(in.k, rows, heads, keys);
  check_cube(in.g, rows, heads, keys);
  check_cube(in.v, rows, heads, values);
  TDM_CHECK(in.beta.size(0) == rows && in.beta.size(1) == heads, in.beta.size(0), in.beta.size(1));
}

void check_pool(const KdaStatePool& pool, const SeqBatch& seqs, const KdaInputs& in) {
  if (!seqs.keeps_state()) {
    return;
  }
  TDM_CHECK(pool.data != nullptr);
  TDM_CHECK(pool.num_heads == in.q.size(1) && pool.key_dim == in.q.size(2) &&
                pool.value_dim == in.v.size(2),
            pool.num_heads, pool.key_dim, pool.value_dim, in.q.size(1), in.q.size(2), in.v.size(2));
}

void check_gate(ConstF32Cube f, ConstF32Vec a_log, ConstF32Vec dt_bias) {
  TDM_CHECK(f.size(2) <= 1 || f.stride(2) == 1, f.stride(2));
  TDM_CHECK(a_log.size(0) == f.size(1), a_log.size(0), f.size(1));
  TDM_CHECK(dt_bias.size(0) == f.size(1) * f.size(2), dt_bias.size(0), f.size(1), f.size(2));
  TDM_CHECK(dt_bias.contiguous() && a_log.contiguous());
}

void check_decode(const KdaDecode& in, F32Cube y, F32Cube conv) {
  const std::int64_t rows = y.size(0);
  const std::int64_t heads = y.size(1);
  const std::int64_t keys = y.size(2);
  check_cube(y, rows, heads, keys);
  check_cube(in.gate_out, rows, heads, keys);
  TDM_CHECK(in.qkv.size(0) == rows && in.qkv.size(1) == 3 * heads * keys, in.qkv.size(0),
            in.qkv.size(1));
  TDM_CHECK(in.b.size(0) == rows && in.b.size(1) == heads, in.b.size(0), in.b.size(1));
  TDM_CHECK(in.f_b != nullptr && in.f_a.size(0) == rows && in.f_a.size(1) == in.f_b->in &&
            in.f_b->out == heads * keys);
  TDM_CHECK(
      in.a_log.size(0) == heads && in.dt_bias.size(0) == heads * keys && in.o_norm.size(0) == keys,
      in.a_log.size(0), in.dt_bias.size(0), in.o_norm.size(0));
  TDM_CHECK(in.a_log.contiguous() && in.dt_bias.contiguous() && in.o_norm.contiguous());
  TDM_CHECK(in.qkv.stride(1) == 1 && in.f_a.stride(1) == 1, in.qkv.stride(1), in.f_a.stride(1));
  const std::int64_t taps = in.filters[0].size(1);
  for (const ConstF32Mat& filter : in.filters) {
    TDM_CHECK(filter.size(0) == heads * keys && filter.size(1) == taps && filter.contiguous(),
              filter.size(0), filter.size(1));
  }
  TDM_CHECK(conv.size(1) == taps - 1 && conv.size(2) == 3 * heads * keys && conv.stride(2) == 1,
            conv.size(1), conv.size(2));
}

/// What its parts do, without what they hand to each other.
OpWork decode_work(F32Cube y, const KdaDecode& in, const SeqBatch& seqs) {
  const std::int64_t state = y.size(1) * y.size(2) * y.size(2);
  const std::int64_t taps = in.filters[0].size(1);
  OpWork work;
  work.shape = shape_of(y);
  work.bytes = bytes_of(y, in.gate_out) + bytes_of(in.qkv, in.f_a, in.b) + bytes_of(*in.f_b) +
               3 * bytes_of(in.filters[0]) + bytes_of(in.dt_bias) +
               slot_bytes(seqs, state + (taps - 1) * in.qkv.size(1));
  work.flops =
      static_cast<double>(y.size(0)) *
      static_cast<double>(7 * state + 2 * in.f_b->out * in.f_b->in + 2 * taps * in.qkv.size(1));
  return work;
}

/// A step of one head: decay, S^T k, k r^T and S^T q over its [K, V] state.
OpWork recurrence_work(F32Cube o, const KdaInputs& in, const SeqBatch& seqs) {
  const std::int64_t state = in.q.size(1) * in.q.size(2) * in.v.size(2);
  OpWork work;
  work.shape = fmt::format("{} x {}", shape_of(in.q), in.v.size(2));
  work.bytes = bytes_of(o, in.q, in.k, in.v, in.g, in.beta) + slot_bytes(seqs, state);
  work.flops = 7.0 * static_cast<double>(in.q.size(0)) * static_cast<double>(state);
  return work;
}

}  // namespace

std::int64_t kda_num_checkpoints(const ExecCtx& ctx, const SeqBatch& seqs, std::int64_t rows) {
  if (!ctx.host_reads()) {
    return rows / kKdaCheckpointRows + seqs.num_seqs();
  }
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < seqs.num_seqs(); ++b) {
    count += (seqs.length(b) + kKdaCheckpointRows - 1) / kKdaCheckpointRows;
  }
  return count;
}

namespace ops {

void kda_gate(const ExecCtx& ctx, F32Cube g, F32Mat beta, ConstF32Cube f, ConstF32Mat b,
              ConstF32Vec a_log, ConstF32Vec dt_bias, KdaGateParams params) {
  check_gate(f, a_log, dt_bias);
  check_cube(g, f.size(0), f.size(1), f.size(2));
  TDM_CHECK(b.size(0) == f.size(0) && b.size(1) == f.size(1) && beta.shape() == b.shape(),
            beta.size(0), beta.size(1), b.size(0), b.size(1));
  const ProfileScope scope(ctx.profiler, "kda_gate", [&] {
    return elementwise_work(g, bytes_of(g, beta, f, b, a_log, dt_bias));
  });
  ctx.ops->kda.gate(ctx, g, beta, f, b, a_log, dt_bias, params);
}

void kda_gate_bwd(const ExecCtx& ctx, F32Cube d_f, F32Vec d_a_log, F32Vec d_dt_bias,
                  ConstF32Cube d_g, ConstF32Cube f, ConstF32Vec a_log, ConstF32Vec dt_bias,
                  KdaGateParams params) {
  check_gate(f, a_log, dt_bias);
  check_cube(d_f, f.size(0), f.size(1), f.size(2));
  check_cube(d_g, f.size(0), f.size(1), f.size(2));
  TDM_CHECK(d_a_log.size(0) == a_log.size(0) && d_dt_bias.size(0) == dt_bias.size(0),
            d_a_log.size(0), d_dt_bias.size(0));
  TDM_CHECK(d_a_log.contiguous() && d_dt_bias.contiguous());
  const ProfileScope scope(ctx.profiler, "kda_gate_bwd");
  ctx.ops->kda.gate_bwd(ctx, d_f, d_a_log, d_dt_bias, d_g, f, a_log, dt_bias, params);
}

void kda_beta_bwd(const ExecCtx& ctx, F32Mat d_b, ConstF32Mat d_beta, ConstF32Mat beta) {
  TDM_CHECK(d_b.shape() == beta.shape() && d_beta.shape() == beta.shape(), beta.size(0),
            beta.size(1));
  const ProfileScope scope(ctx.profiler, "kda_beta_bwd");
  ctx.ops->kda.beta_bwd(ctx, d_b, d_beta, beta);
}

void kda_recurrent(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
                   const SeqBatch& seqs, float* checkpoints) {
  check_inputs(in, o.size(0), o.size(1), o.size(2));
  check_cube(o, o.size(0), o.size(1), o.size(2));
  check_seqs(ctx, seqs, o.size(0), pool.num_slots);
  check_pool(pool, seqs, in);
  const ProfileScope scope(ctx.profiler, "kda_recurrent",
                           [&] { return recurrence_work(o, in, seqs); });
  ctx.ops->kda.recurrent(ctx, o, in, pool, seqs, checkpoints);
}

bool kda_decode(const ExecCtx& ctx, F32Cube y, const KdaDecode& in, const KdaStatePool& pool,
                F32Cube conv, const SeqBatch& seqs) {
  check_decode(in, y, conv);
  check_seqs(ctx, seqs, y.size(0), std::min(pool.num_slots, conv.size(0)));
  TDM_CHECK(seqs.one_row_each && seqs.keeps_state());
  TDM_CHECK(pool.data != nullptr && pool.num_heads == y.size(1) && pool.key_dim == y.size(2) &&
                pool.value_dim == y.size(2),
            pool.num_heads, pool.key_dim, pool.value_dim);
  if (ctx.ops->kda.decode == nullptr) {
    return false;
  }
  const ProfileScope scope(ctx.profiler, "kda_decode", [&] { return decode_work(y, in, seqs); });
  return ctx.ops->kda.decode(ctx, y, in, pool, conv, seqs);
}

void kda_chunk(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
               const SeqBatch& seqs) {
  check_inputs(in, o.size(0), o.size(1), o.size(2));
  check_cube(o, o.size(0), o.size(1), o.size(2));
  check_seqs(ctx, seqs, o.size(0), pool.num_slots);
  check_pool(pool, seqs, in);
  TDM_CHECK(ctx.ops->kda.chunk != nullptr);
  const ProfileScope scope(ctx.profiler, "kda_chunk", [&] { return recurrence_work(o, in, seqs); });
  ctx.ops->kda.chunk(ctx, o, in, pool, seqs);
}

void kda_recurrent_bwd(const ExecCtx& ctx, const KdaGrads& grads, ConstF32Cube d_o,
                       const KdaInputs& in, const SeqBatch& seqs, const float* checkpoints) {
  const std::int64_t rows = d_o.size(0);
  const std::int64_t heads = d_o.size(1);
  const std::int64_t keys = in.q.size(2);
  const std::int64_t values = d_o.size(2);
  check_inputs(in, rows, heads, values);
  check_cube(d_o, rows, heads, values);
  check_cube(grads.d_q, rows, heads, keys);
  check_cube(grads.d_k, rows, heads, keys);
  check_cube(grads.d_g, rows, heads, keys);
  check_cube(grads.d_v, rows, heads, values);
  TDM_CHECK(grads.d_beta.size(0) == rows && grads.d_beta.size(1) == heads, grads.d_beta.size(0),
            grads.d_beta.size(1));
  check_seqs(ctx, seqs, rows);
  TDM_CHECK(!seqs.keeps_state(), seqs.state_slots.size(0));
  TDM_CHECK(checkpoints != nullptr || rows == 0);
  const ProfileScope scope(ctx.profiler, "kda_recurrent_bwd");
  ctx.ops->kda.recurrent_bwd(ctx, grads, d_o, in, seqs, checkpoints);
}

}  // namespace ops
}  // namespace tandem
