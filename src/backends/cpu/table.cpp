#include "backends/cpu/cpu_backend.h"
#include "backends/cpu/families.h"

namespace tandem {

const OpTable& cpu_backend() {
  static const OpTable table = [] {
    OpTable ops;
    ops.name = "cpu";
    ops.kda = cpu_kda_ops();
    ops.mla = cpu_mla_ops();
    return ops;
  }();
  return table;
}

}  // namespace tandem
