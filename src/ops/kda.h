// kda.h — Kimi Delta Attention: gate, recurrence, chunked form, gradients.   Source:
// kimi-k3.md 4.4-4.9, 13.
//
// One layout decision, made here: a state is [K, V] (key rows, value columns contiguous), fp32, one
// per slot and head. Determinism: the recurrence visits tokens one by one in order, so decode,
// prefill, chunked prefill and the training forward give the same bits for the same token whatever
// the split. kda_chunk is the parallel form (other summation order, equal within rounding).
#pragma once

#include <array>
#include <cstdint>

#include "ops/exec_ctx.h"
#include "ops/gemm.h"
#include "ops/seq_batch.h"
#include "tensor/view.h"

namespace tandem {

/// Rows between two saved states of the backward pass, counted from each sequence's first row.
inline constexpr std::int64_t kKdaCheckpointRows = 16;

struct KdaGateParams {
  bool bounded = true;  // lower_bound * sigmoid(exp(A_log) (f + dt_bias)); else -exp(A_log)
                        // softplus(f + dt_bias)
  float lower_bound = -5.0F;
};

/// Inputs of the recurrence. q is already L2-normalised and scaled by K^-1/2, k L2-normalised.
struct KdaInputs {
  ConstF32Cube q;    // [T, H, K]
  ConstF32Cube k;    // [T, H, K]
  ConstF32Cube v;    // [T, H, V]
  ConstF32Cube g;    // [T, H, K] natural-log decay, <= 0
  ConstF32Mat beta;  // [T, H]
};

/// Pools of states. `states` [slots, H, K, V] flattened; unused (null) in training.
struct KdaStatePool {
  float* data = nullptr;
  std::int64_t num_slots = 0;
  std::int64_t num_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;

  [[nodiscard]] std::int64_t state_size() const { return num_heads * key_dim * value_dim; }
  [[nodiscard]] float* state(std::int64_t slot, std::int64_t head) const {
    return data + (slot * num_heads + head) * key_dim * value_dim;
  }
};

struct KdaGrads {
  F32Cube d_q;    // [T, H, K]
  F32Cube d_k;    // [T, H, K]
  F32Cube d_v;    // [T, H, V]
  F32Cube d_g;    // [T, H, K]
  F32Mat d_beta;  // [T, H]
};

/// What lies between a mixer's projections of its input and its output projection, and the
/// projections. Key and value width are the same, K.
struct KdaDecode {
  ConstF32Mat qkv;                     // [B, 3 H K] raw q | k | v
  ConstF32Mat f_a;                     // [B, F]: input of the decay's second projection,
  const PackedWeight* f_b = nullptr;   // [H K, F], its weight
  ConstF32Mat b;                       // [B, H] raw write strength
  ConstF32Cube gate_out;               // [B, H, K] raw output gate
  std::array<ConstF32Mat, 3> filters;  // [H K, W] of q, k and v
  ConstF32Vec a_log;                   // [H]
  ConstF32Vec dt_bias;                 // [H K]
  ConstF32Vec o_norm;                  // [K]
  KdaGateParams gate;
  float q_scale = 1.0F;
  float l2_eps = 0.0F;
  float norm_eps = 0.0F;
};

/// Number of checkpoints of a batch: sum over sequences of ceil(length / kKdaCheckpointRows), or an
/// upper bound where the host cannot read the lengths.
[[nodiscard]] std::int64_t kda_num_checkpoints(const ExecCtx& ctx, const SeqBatch& seqs,
                                               std::int64_t rows);

struct KdaOps {
  void (*gate)(const ExecCtx&, F32Cube g, F32Mat beta, ConstF32Cube f, ConstF32Mat b,
               ConstF32Vec a_log, ConstF32Vec dt_bias, KdaGateParams params);
  void (*gate_bwd)(const ExecCtx&, F32Cube d_f, F32Vec d_a_log, F32Vec d_dt_bias, ConstF32Cube d_g,
                   ConstF32Cube f, ConstF32Vec a_log, ConstF32Vec dt_bias, KdaGateParams params);
  void (*beta_bwd)(const ExecCtx&, F32Mat d_b, ConstF32Mat d_beta, ConstF32Mat beta);
  void (*recurrent)(const ExecCtx&, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
                    const SeqBatch& seqs, float* checkpoints);
  bool (*decode)(const ExecCtx&, F32Cube y, const KdaDecode& in, const KdaStatePool& pool,
                 F32Cube conv, const SeqBatch& seqs);
  void (*chunk)(const ExecCtx&, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
                const SeqBatch& seqs);
  void (*recurrent_bwd)(const ExecCtx&, const KdaGrads& grads, ConstF32Cube d_o,
                        const KdaInputs& in, const SeqBatch& seqs, const float* checkpoints);
};

namespace ops {

/// Both of a token's gates: g = log decay, beta = sigmoid(b).   Shapes: g, f [T, H, K]; beta, b [T,
/// H]; a_log [H] (a longer stored vector is cut by the caller); dt_bias [H*K].   Aliasing: beta may
/// be b.
void kda_gate(const ExecCtx& ctx, F32Cube g, F32Mat beta, ConstF32Cube f, ConstF32Mat b,
              ConstF32Vec a_log, ConstF32Vec dt_bias, KdaGateParams params);
/// d_f is overwritten, d_a_log and d_dt_bias accumulated.
void kda_gate_bwd(const ExecCtx& ctx, F32Cube d_f, F32Vec d_a_log, F32Vec d_dt_bias,
                  ConstF32Cube d_g, ConstF32Cube f, ConstF32Vec a_log, ConstF32Vec dt_bias,
                  KdaGateParams params);
/// d_b is overwritten.   Shapes: [T, H].
void kda_beta_bwd(const ExecCtx& ctx, F32Mat d_b, ConstF32Mat d_beta, ConstF32Mat beta);

/// The recurrence: S <- diag(e^g) S; r = v - S^T k; S <- S + k (beta r)^T; o = S^T q, per sequence
/// and head. Shapes: o [T, H, V]. With slots, states are read and left at the last row; without,
/// they start at 0 and are dropped. checkpoints: null, or [kda_num_checkpoints, H, K, V]: the state
/// before rows 0, 16, 32, ... of each sequence.
void kda_recurrent(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
                   const SeqBatch& seqs, float* checkpoints = nullptr);
/// Of sequences of one row each (seqs.one_row_each), with slots: conv1d, l2_norm of q and k,
/// linear, kda_gate, kda_recurrent and rms_norm_gated at once, bit for bit what these give one
/// after the other; padding rows are zeros. False: the backend has no such kernel for these shapes,
/// and nothing was done. Shapes: y [B, H, K]; conv as conv1d's state.   Aliasing: none.
[[nodiscard]] bool kda_decode(const ExecCtx& ctx, F32Cube y, const KdaDecode& in,
                              const KdaStatePool& pool, F32Cube conv, const SeqBatch& seqs);
/// The chunkwise form of kimi-k3.md 4.7 (chunks of 64 rows in sub-blocks of 16), for any g <= 0.
void kda_chunk(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
               const SeqBatch& seqs);
/// Training batches only: every gradient is overwritten; states are recomputed from `checkpoints`.
void kda_recurrent_bwd(const ExecCtx& ctx, const KdaGrads& grads, ConstF32Cube d_o,
                       const KdaInputs& in, const SeqBatch& seqs, const float* checkpoints);

}  // namespace ops
}  // namespace tandem
