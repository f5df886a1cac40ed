// loss.h — log-probabilities and entropy of one token a row. The sampler, the trainer and the
// evaluation all call this one routine, so equal logits give equal bits. All losses are built above
// it from (log-prob, entropy) and their gradients.
#pragma once

#include "ops/exec_ctx.h"
#include "tensor/view.h"

namespace tandem {

struct LossOps {
  void (*log_prob)(const ExecCtx&, F32Vec logprob, F32Vec entropy, ConstF32Mat logits,
                   ConstI32Vec targets, ConstF32Vec temperature);
  void (*log_prob_bwd)(const ExecCtx&, F32Mat d_logits, ConstF32Vec d_logprob,
                       ConstF32Vec d_entropy, ConstF32Mat logits, ConstI32Vec targets,
                       ConstF32Vec temperature);
};

namespace ops {

/// logprob[t] = log softmax(logits[t] / temperature[t])[targets[t]], natural, over the full
/// vocabulary; entropy of the same softmax. Shapes: logits [T, V]; targets, temperature, logprob
/// [T]; entropy [T] or an empty view. temperature > 0. target -1: the row is skipped (logprob 0,
/// entropy 0).
void log_prob(const ExecCtx& ctx, F32Vec logprob, F32Vec entropy, ConstF32Mat logits,
              ConstI32Vec targets, ConstF32Vec temperature);
/// d_logits is overwritten (zero rows where the target is -1); d_entropy may be empty.   Aliasing:
/// d_logits may be logits.
void log_prob_bwd(const ExecCtx& ctx, F32Mat d_logits, ConstF32Vec d_logprob, ConstF32Vec d_entropy,
                  ConstF32Mat logits, ConstI32Vec targets, ConstF32Vec temperature);

}  // namespace ops
}  // namespace tandem
