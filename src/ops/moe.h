// moe.h — sigmoid top-k router with a selection bias, and the routed experts.   Source:
// kimi-k3.md 6.2, 6.3, 13.
#pragma once

#include <span>

#include "ops/act.h"
#include "ops/exec_ctx.h"
#include "ops/gemm.h"
#include "ops/norm.h"
#include "tensor/view.h"

namespace tandem {

struct RouterParams {
  bool renormalize = true;      // divide the chosen weights by (their sum + 1e-20)
  float scaling_factor = 1.0F;  // routed_scaling_factor
};

/// Weights of all experts of one layer: w1 = gate and w3 = up [F, DX], w2 = down [DX, F].
struct ExpertWeights {
  std::span<const PackedWeight> w1;  // [E]
  std::span<const PackedWeight> w3;  // [E]
  std::span<const PackedWeight> w2;  // [E]
};
struct ExpertGrads {
  std::span<const F32Mat> d_w1;  // [E] of [F, DX]
  std::span<const F32Mat> d_w3;  // [E] of [F, DX]
  std::span<const F32Mat> d_w2;  // [E] of [DX, F]
};

/// What the forward leaves for the backward. Row r is a (token, slot) pair; pairs are grouped by
/// expert, tokens in order inside.
struct ExpertsSaved {
  F32Mat gate;          // [T*A, F] x w1^T
  F32Mat up;            // [T*A, F] x w3^T
  F32Mat out;           // [T*A, DX] expert output before weighting
  I32Mat pair_of_slot;  // [T, A] row r of (token, slot)
};

struct MoeOps {
  void (*route)(const ExecCtx&, I32Mat ids, F32Mat weights, F32Mat scores, ConstF32Mat logits,
                ConstF32Vec bias, RouterParams params);
  void (*route_replay)(const ExecCtx&, F32Mat weights, F32Mat scores, ConstF32Mat logits,
                       ConstI32Mat ids, RouterParams params);
  void (*route_bwd)(const ExecCtx&, F32Mat d_logits, ConstF32Mat d_weights, ConstI32Mat ids,
                    ConstF32Mat scores, RouterParams params);
  void (*experts)(const ExecCtx&, F32Mat out, const RowNorm& norm, const ExpertsSaved* saved,
                  ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights, const ExpertWeights& experts,
                  SituParams act);
  void (*experts_bwd)(const ExecCtx&, F32Mat d_x, F32Mat d_weights, const ExpertGrads& grads,
                      ConstF32Mat d_out, ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights,
                      const ExpertWeights& experts_transposed, const ExpertsSaved& saved,
                      SituParams act);
};

namespace ops {

/// scores = sigmoid(logits); ids = the A largest of scores + bias, in falling order, ties to the
/// lower id; weights = their scores (without the bias), renormalised and scaled. Shapes: ids,
/// weights [T, A]; scores, logits [T, E]; bias [E].
void route(const ExecCtx& ctx, I32Mat ids, F32Mat weights, F32Mat scores, ConstF32Mat logits,
           ConstF32Vec bias, RouterParams params);
/// The same with the ids given (R3 routing replay): weights come from the present logits.
void route_replay(const ExecCtx& ctx, F32Mat weights, F32Mat scores, ConstF32Mat logits,
                  ConstI32Mat ids, RouterParams params);
/// d_logits [T, E] is overwritten (0 at experts not chosen). The bias has no gradient.
void route_bwd(const ExecCtx& ctx, F32Mat d_logits, ConstF32Mat d_weights, ConstI32Mat ids,
               ConstF32Mat scores, RouterParams params);

/// out[t] = sum over slots a (in slot order) of weights[t, a] * w2_e( SiTU( x[t] w1_e^T, x[t]
/// w3_e^T ) ), e = ids[t, a]. norm.y = out (mean(out^2) + norm.eps)^-1/2 * norm.w, if wanted: a row
/// reduced in a fixed order, which need not be the order of ops::rms_norm(). `out` may then be a
/// default view: it is not wanted. Shapes: out, norm.y, x [T, DX]; ids, weights [T, A].   saved:
/// null for inference.   Experts nobody chose are not touched. Determinism: batch-invariant (slot
/// order, linear()'s chains).
void experts(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, const ExpertsSaved* saved,
             ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights, const ExpertWeights& experts,
             SituParams act);
/// d_x, d_weights are overwritten, expert gradients accumulated. experts_transposed: the same
/// weights packed kTransposed.
void experts_bwd(const ExecCtx& ctx, F32Mat d_x, F32Mat d_weights, const ExpertGrads& grads,
                 ConstF32Mat d_out, ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights,
                 const ExpertWeights& experts_transposed, const ExpertsSaved& saved,
                 SituParams act);

}  // namespace ops
}  // namespace tandem
