#include "backends/cpu/mla.h"

#include <algorithm>

#include "backends/cpu/families.h"

namespace tandem {

void cpu::mla_store(const ExecCtx&, F32Mat rows, ConstF32Mat kv, ConstI32Vec slot_mapping) {
  for (std::int64_t t = 0; t < kv.size(0); ++t) {
    if (slot_mapping(t) >= 0) {
      std::copy(kv.row(t), kv.row(t) + kv.size(1), rows.row(slot_mapping(t)));
    }
  }
}

MlaOps cpu_mla_ops() {
  return {
      .store = cpu::mla_store,
      .absorbed = cpu::mla_absorbed,
      .absorbed_bwd = cpu::mla_absorbed_bwd,
      .expanded = cpu::mla_expanded,
  };
}

}  // namespace tandem
