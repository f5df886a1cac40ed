// embed.h — token embedding.
#pragma once

#include "ops/exec_ctx.h"
#include "ops/gemm.h"
#include "tensor/view.h"

namespace tandem {

struct EmbedOps {
  void (*embed)(const ExecCtx&, F32Mat y, const WeightRef& table, ConstI32Vec ids);
  void (*embed_bwd)(const ExecCtx&, F32Mat d_table, ConstF32Mat d_y, ConstI32Vec ids);
};

namespace ops {

/// y[t] = table[ids[t]].   Shapes: y [T, D]; table [V, D] kF32 or kBF16; ids [T], each in [0, V).
void embed(const ExecCtx& ctx, F32Mat y, const WeightRef& table, ConstI32Vec ids);
/// d_table[ids[t]] += d_y[t], rows in increasing t.
void embed_bwd(const ExecCtx& ctx, F32Mat d_table, ConstF32Mat d_y, ConstI32Vec ids);

}  // namespace ops
}  // namespace tandem
