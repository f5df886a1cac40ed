// finite.h — a check that stored weights are numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/error.h"
#include "tensor/dtype.h"

namespace tandem::kimi_k3 {

/// Of a tensor in F32 or BF16 whose rows have `cols` elements; other types pass.
/// Errors: a Failure with the place of the first NaN or infinity.
[[nodiscard]] Status check_finite(std::span<const std::byte> bytes, DType dtype, std::int64_t cols);

}  // namespace tandem::kimi_k3
