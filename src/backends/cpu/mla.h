// mla.h — the MLA entries of the CPU op table.
#pragma once

#include "ops/mla.h"

namespace tandem::cpu {

void mla_prepare(const ExecCtx& ctx, const MlaPrepare& x);
void mla_store(const ExecCtx& ctx, const LatentRows& rows, ConstF32Mat kv,
               ConstI32Vec slot_mapping);
void mla_absorbed(const ExecCtx& ctx, F32Cube o_lat, F32Mat lse, const MlaQuery& q,
                  const MlaCacheView& cache, const MlaBatch& batch, float scale);
void mla_absorbed_bwd(const ExecCtx& ctx, const MlaQueryGrad& d_q, F32Mat d_kv,
                      ConstF32Cube d_o_lat, const MlaQuery& q, ConstF32Mat kv, ConstF32Cube o_lat,
                      ConstF32Mat lse, ConstI32Vec cu_seqlens, float scale);
void mla_expanded(const ExecCtx& ctx, F32Cube o, ConstF32Cube q, ConstF32Cube k_nope,
                  ConstF32Mat k_shared, ConstF32Cube v, ConstI32Vec cu_seqlens, float scale);

}  // namespace tandem::cpu
