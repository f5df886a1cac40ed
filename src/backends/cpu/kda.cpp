#include "backends/cpu/kda.h"

#include "backends/cpu/families.h"

namespace tandem {

KdaOps cpu_kda_ops() {
  return {
      .gate = cpu::kda_gate,
      .gate_bwd = cpu::kda_gate_bwd,
      .beta_bwd = cpu::kda_beta_bwd,
      .recurrent = cpu::kda_recurrent,
      .decode = nullptr,  // its parts, one after the other
      .chunk = cpu::kda_chunk,
      .recurrent_bwd = cpu::kda_recurrent_bwd,
  };
}

}  // namespace tandem
