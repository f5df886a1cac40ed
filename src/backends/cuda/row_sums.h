// row_sums.h — adding up partial results, one row each, in an order that their number alone fixes.
#pragma once

#include <cstdint>

#include "ops/exec_ctx.h"

namespace tandem::cuda {

/// into[i] += sum over r of rows[r * width + i].   Scratch: the workspace, in the caller's scope.
void add_row_sum(const ExecCtx& ctx, const char* op, float* into, const float* rows,
                 std::int64_t num_rows, std::int64_t width);

/// The sums as one row in the workspace, in the caller's scope. num_rows >= 1.
[[nodiscard]] const float* row_sum(const ExecCtx& ctx, const char* op, const float* rows,
                                   std::int64_t num_rows, std::int64_t width);

}  // namespace tandem::cuda
