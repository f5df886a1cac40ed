// cpu_backend.h — the CPU implementation of the op table (SIMD through Google Highway, dispatched
// at run time).
#pragma once

#include "ops/op_table.h"

namespace tandem {

[[nodiscard]] const OpTable& cpu_backend();

}  // namespace tandem
