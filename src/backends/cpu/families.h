// families.h — one function a family: its entries of the CPU op table, for this machine's widest
// supported instruction set.
#pragma once

#include "ops/op_table.h"

namespace tandem {

KdaOps cpu_kda_ops();
MlaOps cpu_mla_ops();

}  // namespace tandem
