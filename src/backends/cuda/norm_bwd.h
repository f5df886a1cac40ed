// norm_bwd.h — backward passes of the norms, for norm.cu's table.   Contract: ops/norm.h
#pragma once

#include "ops/exec_ctx.h"
#include "tensor/view.h"

namespace tandem::cuda {

void rms_norm_bwd(const ExecCtx& ctx, F32Mat d_x, F32Vec d_w, ConstF32Mat d_y, ConstF32Mat x,
                  ConstF32Vec w, float eps);
void rms_norm_gated_bwd(const ExecCtx& ctx, F32Cube d_o, F32Cube d_gate, F32Vec d_w,
                        ConstF32Cube d_y, ConstF32Cube o, ConstF32Cube gate, ConstF32Vec w,
                        float eps);
void l2_norm_bwd(const ExecCtx& ctx, F32Cube d_x, ConstF32Cube d_y, ConstF32Cube x, float scale,
                 float eps);

}  // namespace tandem::cuda
