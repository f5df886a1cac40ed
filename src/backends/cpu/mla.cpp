#include "backends/cpu/mla.h"

#include <algorithm>

#include "backends/cpu/families.h"
#include "core/checked_cast.h"
#include "ops/op_table.h"
#include "tensor/arena_views.h"

namespace tandem {

void cpu::mla_prepare(const ExecCtx& ctx, const MlaPrepare& x) {
  const ArenaScope scope(*ctx.workspace);
  const NormOps& norm = ctx.ops->norm;
  if (!x.cq.empty()) {
    norm.rms_norm(ctx, x.cq, x.cq_raw, x.q_weight, x.q_eps);
  }
  const std::int64_t latent = x.kv_weight.size(0);
  const std::int64_t shared = x.kv_raw.size(1) - latent;
  const F32Mat kv =
      x.kv.empty() ? take_mat(*ctx.workspace, x.kv_raw.size(0), x.kv_raw.size(1)) : x.kv;
  norm.rms_norm(ctx, kv.cols(0, latent), x.kv_raw.cols(0, latent), x.kv_weight, x.kv_eps);
  for (std::int64_t t = 0; t < kv.size(0); ++t) {
    std::copy_n(x.kv_raw.row(t) + latent, shared, kv.row(t) + latent);
  }
  if (!x.rows.empty()) {
    mla_store(ctx, x.rows, kv, x.slot_mapping);
  }
}

void cpu::mla_store(const ExecCtx&, const LatentRows& rows, ConstF32Mat kv,
                    ConstI32Vec slot_mapping) {
  for (std::int64_t t = 0; t < kv.size(0); ++t) {
    if (slot_mapping(t) >= 0) {
      encode_latent(rows.row(slot_mapping(t)), rows.format, {kv.row(t), usize(kv.size(1))});
    }
  }
}

MlaOps cpu_mla_ops() {
  return {
      .prepare = cpu::mla_prepare,
      .store = cpu::mla_store,
      .absorbed = cpu::mla_absorbed,
      .absorbed_bwd = cpu::mla_absorbed_bwd,
      .expanded = cpu::mla_expanded,
  };
}

}  // namespace tandem
