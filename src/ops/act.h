// act.h — element-wise activations: SiTU and the sigmoid output gate of MLA.
#pragma once

#include "ops/exec_ctx.h"
#include "tensor/view.h"

namespace tandem {

/// SiTU(g, u) = beta tanh(g / beta) sigmoid(g) * lambda tanh(u / lambda).   Source: kimi-k3.md 6.4.
struct SituParams {
  float beta = 4.0F;
  float linear_beta = 25.0F;  // lambda; <= 0 means the second factor is u itself
};

struct ActOps {
  void (*situ)(const ExecCtx&, F32Mat y, ConstF32Mat gate, ConstF32Mat up, SituParams params);
  void (*situ_bwd)(const ExecCtx&, F32Mat d_gate, F32Mat d_up, ConstF32Mat d_y, ConstF32Mat gate,
                   ConstF32Mat up, SituParams params);
  void (*sigmoid_gate)(const ExecCtx&, F32Mat y, ConstF32Mat o, ConstF32Mat gate);
  void (*sigmoid_gate_bwd)(const ExecCtx&, F32Mat d_o, F32Mat d_gate, ConstF32Mat d_y,
                           ConstF32Mat o, ConstF32Mat gate);
  void (*add)(const ExecCtx&, F32Mat y, ConstF32Mat a, ConstF32Mat b);
  void (*copy)(const ExecCtx&, F32Cube y, ConstF32Cube x);
};

namespace ops {

/// y = SiTU(gate, up).   Shapes: all [T, F].   Aliasing: y may be gate or up.
void situ(const ExecCtx& ctx, F32Mat y, ConstF32Mat gate, ConstF32Mat up, SituParams params);
/// Both gradients are overwritten.   Aliasing: d_gate or d_up may be d_y.
void situ_bwd(const ExecCtx& ctx, F32Mat d_gate, F32Mat d_up, ConstF32Mat d_y, ConstF32Mat gate,
              ConstF32Mat up, SituParams params);

/// y = o * sigmoid(gate).   Shapes: all [T, D].   Aliasing: y may be o.
void sigmoid_gate(const ExecCtx& ctx, F32Mat y, ConstF32Mat o, ConstF32Mat gate);
void sigmoid_gate_bwd(const ExecCtx& ctx, F32Mat d_o, F32Mat d_gate, ConstF32Mat d_y, ConstF32Mat o,
                      ConstF32Mat gate);

/// y = a + b.   Shapes: all [T, D].   Aliasing: y may be a or b.
void add(const ExecCtx& ctx, F32Mat y, ConstF32Mat a, ConstF32Mat b);

/// y = x, for cutting and joining strided pieces.   Shapes: both [A, B, C].   Aliasing: none.
void copy(const ExecCtx& ctx, F32Cube y, ConstF32Cube x);

}  // namespace ops
}  // namespace tandem
