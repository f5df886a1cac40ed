#include "ops/loss.h"

#include <algorithm>

#include "ops/check_views.h"
#include "ops/op_table.h"
#include "ops/op_work.h"

namespace tandem::ops {
namespace {

void check_inputs(const ExecCtx& ctx, ConstF32Mat logits, ConstI32Vec targets,
                  ConstF32Vec temperature) {
  const std::int64_t rows = logits.size(0);
  TDM_CHECK(rows_contiguous(logits), logits.stride(1));
  TDM_CHECK(vec_of(targets, rows) && vec_of(temperature, rows), targets.size(0),
            temperature.size(0), rows);
  for (std::int64_t t = 0; t < rows && ctx.host_reads(); ++t) {
    TDM_CHECK(targets(t) >= -1 && targets(t) < logits.size(1), t, targets(t), logits.size(1));
    TDM_CHECK(temperature(t) > 0, t, temperature(t));
  }
}

}  // namespace

void log_prob(const ExecCtx& ctx, F32Vec logprob, F32Vec entropy, ConstF32Mat logits,
              ConstI32Vec targets, ConstF32Vec temperature) {
  check_inputs(ctx, logits, targets, temperature);
  TDM_CHECK(vec_of(logprob, logits.size(0)), logprob.size(0), logits.size(0));
  TDM_CHECK(entropy.empty() || vec_of(entropy, logits.size(0)), entropy.size(0), logits.size(0));
  TDM_CHECK(ctx.ops->loss.log_prob != nullptr);
  const ProfileScope scope(ctx.profiler, "log_prob",
                           [&] { return elementwise_work(logits, bytes_of(logits)); });
  ctx.ops->loss.log_prob(ctx, logprob, entropy, logits, targets, temperature);
}

void log_prob_bwd(const ExecCtx& ctx, F32Mat d_logits, ConstF32Vec d_logprob, ConstF32Vec d_entropy,
                  ConstF32Mat logits, ConstI32Vec targets, ConstF32Vec temperature) {
  check_inputs(ctx, logits, targets, temperature);
  TDM_CHECK(rows_like(d_logits, logits), d_logits.size(0), d_logits.size(1));
  TDM_CHECK(vec_of(d_logprob, logits.size(0)), d_logprob.size(0), logits.size(0));
  TDM_CHECK(d_entropy.empty() || vec_of(d_entropy, logits.size(0)), d_entropy.size(0));
  TDM_CHECK(ctx.ops->loss.log_prob_bwd != nullptr);
  const ProfileScope scope(ctx.profiler, "log_prob_bwd");
  ctx.ops->loss.log_prob_bwd(ctx, d_logits, d_logprob, d_entropy, logits, targets, temperature);
}

}  // namespace tandem::ops
