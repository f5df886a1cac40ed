#include "backends/cpu/cpu_backend.h"
#include "backends/cpu/families.h"

namespace tandem {

const OpTable& cpu_backend() {
  static const OpTable table = [] {
    OpTable ops;
    ops.name = "cpu";
    ops.gemm = cpu_gemm_ops();
    cpu_add_expert_ops(ops.moe);
    return ops;
  }();
  return table;
}

}  // namespace tandem
