// kda.h — the KDA entries of the CPU op table, one translation unit each.
#pragma once

#include "ops/kda.h"

namespace tandem::cpu {

void kda_gate(const ExecCtx& ctx, F32Cube g, F32Mat beta, ConstF32Cube f, ConstF32Mat b,
              ConstF32Vec a_log, ConstF32Vec dt_bias, KdaGateParams params);
void kda_gate_bwd(const ExecCtx& ctx, F32Cube d_f, F32Vec d_a_log, F32Vec d_dt_bias,
                  ConstF32Cube d_g, ConstF32Cube f, ConstF32Vec a_log, ConstF32Vec dt_bias,
                  KdaGateParams params);
void kda_beta_bwd(const ExecCtx& ctx, F32Mat d_b, ConstF32Mat d_beta, ConstF32Mat beta);
void kda_recurrent(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
                   const SeqBatch& seqs, float* checkpoints);
void kda_chunk(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
               const SeqBatch& seqs);
void kda_recurrent_bwd(const ExecCtx& ctx, const KdaGrads& grads, ConstF32Cube d_o,
                       const KdaInputs& in, const SeqBatch& seqs, const float* checkpoints);

}  // namespace tandem::cpu
