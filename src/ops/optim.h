// optim.h — optimizer updates on fp32 master weights.   Source: rl.md 3.1, 3.3.
#pragma once

#include <cstdint>
#include <span>

#include "ops/exec_ctx.h"
#include "tensor/view.h"

namespace tandem {

struct AdamWParams {
  float lr = 1e-3F;
  float beta1 = 0.9F;
  float beta2 = 0.98F;
  float eps = 1e-8F;
  float weight_decay = 0.0F;
  std::int64_t step = 1;    // counts from 1, for the bias corrections
  float grad_scale = 1.0F;  // multiplies the gradient (clipping)
};

struct MuonParams {
  float lr = 1e-3F;
  float momentum = 0.95F;
  float weight_decay = 0.0F;
  float grad_scale = 1.0F;
  float update_scale =
      0.2F;  // times sqrt(max(rows, cols)): AdamW's RMS ("spectral", Moonshot's factor)
};

struct OptimOps {
  void (*adamw)(const ExecCtx&, std::span<float> w, std::span<float> m, std::span<float> v,
                std::span<const float> g, const AdamWParams& params);
  void (*muon)(const ExecCtx&, F32Mat w, F32Mat momentum, ConstF32Mat g, const MuonParams& params);
  double (*sum_squares)(const ExecCtx&, std::span<const float> values);
};

namespace ops {

/// One decoupled AdamW step on one tensor, in place.   Shapes: all [n].
void adamw(const ExecCtx& ctx, std::span<float> w, std::span<float> m, std::span<float> v,
           std::span<const float> g, const AdamWParams& params);
/// One Muon step (Nesterov momentum, 5 Newton-Schulz iterations) on one matrix, in place.   Shapes:
/// all [N, K].
void muon(const ExecCtx& ctx, F32Mat w, F32Mat momentum, ConstF32Mat g, const MuonParams& params);
/// Sum of squares in double, in a fixed order.
[[nodiscard]] double sum_squares(const ExecCtx& ctx, std::span<const float> values);

}  // namespace ops
}  // namespace tandem
