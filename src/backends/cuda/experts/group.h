// group.h — (token, slot) pairs grouped by expert, on the device.
#pragma once

#include <cstdint>

#include "ops/exec_ctx.h"
#include "tensor/view.h"

namespace tandem::cuda {

/// Device memory. Pair t * A + a is slot a of token t. Pairs whose id is no expert stand behind all
/// others: they belong to no expert's rows.
struct ExpertGroups {
  const std::int32_t* pair_order;    // [T*A] pair index t*A+a, grouped by expert, tokens rising
  const std::int32_t* expert_begin;  // [E+1]
  const std::int32_t* position;      // [T*A] where pair t*A+a landed; -1 when its id is no expert
};

/// One launch. The arrays live in the workspace: the caller holds the ArenaScope.
/// Shapes: ids [T, A], the last axis contiguous.   Determinism: the order is fixed.
[[nodiscard]] ExpertGroups group_by_expert(const ExecCtx& ctx, ConstI32Mat ids,
                                           std::int64_t num_experts);

}  // namespace tandem::cuda
