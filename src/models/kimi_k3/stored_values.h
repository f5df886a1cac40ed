// stored_values.h — the numbers of a checkpoint's tensors: as fp32, and whether they are numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/error.h"
#include "io/safetensors.h"
#include "ops/gemm.h"

namespace tandem::kimi_k3 {

/// A tensor in F32 or BF16.
void to_float(const TensorInfo& tensor, std::span<float> out);
/// Errors: a Failure with the place of the first scale or code that is no number.
[[nodiscard]] Status validate_scales(const WeightRef& w);
[[nodiscard]] Expected<std::vector<float>> dequantise_any(const WeightRef& w);

/// Of a tensor in F32 or BF16 whose rows have `cols` elements; other types pass.
/// Errors: a Failure with the place of the first NaN or infinity.
[[nodiscard]] Status check_finite(std::span<const std::byte> bytes, DType dtype, std::int64_t cols);

}  // namespace tandem::kimi_k3
