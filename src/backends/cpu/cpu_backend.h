// cpu_backend.h — the CPU implementation of the op table (SIMD through Google Highway, dispatched
// at run time).
#pragma once

#include <string>

#include "ops/op_table.h"

namespace tandem {

[[nodiscard]] const OpTable& cpu_backend();

/// Name of the instruction set that this machine's ops use, "AVX2" for one. Machines with different
/// ones may differ in the last bits.
[[nodiscard]] std::string cpu_instruction_set();

}  // namespace tandem
