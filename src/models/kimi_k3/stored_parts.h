// stored_parts.h — how one tensor of the table is stored: plain, or as the parts of a quantised
// matrix (kimi-k3.md 7).
#pragma once

#include <vector>

#include "io/safetensors.h"
#include "models/kimi_k3/init.h"
#include "models/kimi_k3/tensor_table.h"

namespace tandem::kimi_k3 {

[[nodiscard]] bool is_mxfp4(const TensorEntry& entry, const InitOptions& options);
[[nodiscard]] bool is_nvfp4(const TensorEntry& entry, const InitOptions& options);
[[nodiscard]] bool is_fp8(const TensorEntry& entry, const InitOptions& options);

/// In the order packed codes, block scales, scale of the tensor, scale of the inputs.
[[nodiscard]] std::vector<TensorSpec> stored_parts(const TensorEntry& entry,
                                                   const InitOptions& options);

}  // namespace tandem::kimi_k3
