// norm.h — RMSNorm, plain and gated, and the per-head L2 norm of KDA. Each row is reduced in one
// fixed order.
#pragma once

#include <cstdint>
#include <span>

#include "ops/exec_ctx.h"
#include "tensor/view.h"

namespace tandem {

/// Blocks of heads of one l2_norm().
inline constexpr std::int64_t kMaxL2Scales = 4;

/// The RMSNorm that an op does of the rows it makes (ops::attn_res(), ops::experts()). Not wanted:
/// a default one.
struct RowNorm {
  F32Mat y;       // [T, D]
  ConstF32Vec w;  // [D]
  float eps = 0;

  [[nodiscard]] bool wanted() const { return y.size(1) > 0; }
};

struct NormOps {
  void (*rms_norm)(const ExecCtx&, F32Mat y, ConstF32Mat x, ConstF32Vec w, float eps);
  void (*rms_norm_bwd)(const ExecCtx&, F32Mat d_x, F32Vec d_w, ConstF32Mat d_y, ConstF32Mat x,
                       ConstF32Vec w, float eps);
  void (*rms_norm_gated)(const ExecCtx&, F32Cube y, ConstF32Cube o, ConstF32Cube gate,
                         ConstF32Vec w, float eps);
  void (*rms_norm_gated_bwd)(const ExecCtx&, F32Cube d_o, F32Cube d_gate, F32Vec d_w,
                             ConstF32Cube d_y, ConstF32Cube o, ConstF32Cube gate, ConstF32Vec w,
                             float eps);
  void (*l2_norm)(const ExecCtx&, F32Cube y, ConstF32Cube x, std::span<const float> scales,
                  float eps);
  void (*l2_norm_bwd)(const ExecCtx&, F32Cube d_x, ConstF32Cube d_y, ConstF32Cube x, float scale,
                      float eps);
};

namespace ops {

/// y = x (mean(x^2) + eps)^-1/2 * w.   Shapes: y, x [T, D]; w [D].   Source: kimi-k3.md 1.3, 2.2.
void rms_norm(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, ConstF32Vec w, float eps);
/// d_x is overwritten, d_w accumulated.
void rms_norm_bwd(const ExecCtx& ctx, F32Mat d_x, F32Vec d_w, ConstF32Mat d_y, ConstF32Mat x,
                  ConstF32Vec w, float eps);

/// y = o (mean(o^2) + eps)^-1/2 * w * sigmoid(gate), per head.   Shapes: y, o, gate [T, H, V]; w
/// [V].   Source: kimi-k3.md 4.6.
void rms_norm_gated(const ExecCtx& ctx, F32Cube y, ConstF32Cube o, ConstF32Cube gate, ConstF32Vec w,
                    float eps);
/// d_o, d_gate are overwritten, d_w accumulated.
void rms_norm_gated_bwd(const ExecCtx& ctx, F32Cube d_o, F32Cube d_gate, F32Vec d_w,
                        ConstF32Cube d_y, ConstF32Cube o, ConstF32Cube gate, ConstF32Vec w,
                        float eps);

/// y = scale * x (sum(x^2) + eps)^-1/2, per head.   Shapes: y, x [T, H, K]; scales S <=
/// kMaxL2Scales: of H/S heads each, in order.   Aliasing: y may be x.   Source: kimi-k3.md 4.3.
void l2_norm(const ExecCtx& ctx, F32Cube y, ConstF32Cube x, std::span<const float> scales,
             float eps);
/// Of heads with one scale. d_x is overwritten; x is the forward's input.   Aliasing: d_x may be
/// d_y.
void l2_norm_bwd(const ExecCtx& ctx, F32Cube d_x, ConstF32Cube d_y, ConstF32Cube x, float scale,
                 float eps);

}  // namespace ops
}  // namespace tandem
