// work.cuh — what a CTA of the experts' kernels works on: some tokens of one expert; and the sum of
// their rows.
#pragma once

#include <cstdint>

#include "backends/cuda/experts/choose_experts.h"
#include "ops/exec_ctx.h"
#include "ops/norm.h"
#include "tensor/view.h"

namespace tandem::cuda {

/// Some (token, slot) pairs of one expert: numbers [first, first + count) of
/// ExpertWork::pair_order.
struct ExpertItem {
  std::int32_t expert;  // -1: nothing to do
  std::int32_t first;
  std::int32_t count;
};

struct ExpertWork {
  const ExpertItem* items;         // null for a single token: item i is its slot i
  const std::int32_t* ids;         // [A], where items is null
  const std::int32_t* pair_order;  // null where items is
  std::int32_t num_experts;
  std::int32_t slots;             // A
  const std::int32_t* num_items;  // that have tokens; null where items is

  /// Items, without the empty ones at the end.
  __device__ __forceinline__ std::int32_t count() const {
    return num_items == nullptr ? slots : *num_items;
  }
  __device__ __forceinline__ ExpertItem item(unsigned index) const {
    if (items != nullptr) {
      return items[index];
    }
    const std::int32_t expert = ids[index];
    return {expert < num_experts ? expert : -1, static_cast<std::int32_t>(index), 1};
  }
  /// Token * A + slot.
  __device__ __forceinline__ std::int32_t pair(std::int32_t index) const {
    return pair_order == nullptr ? index : pair_order[index];
  }
};

/// Every expert's tokens cut into items of config.chunk, experts rising; config.items in all, the
/// last ones empty. In ctx.workspace: the caller holds an ArenaScope.   Shapes: ids [T, A].
[[nodiscard]] ExpertWork expert_work(const ExecCtx& ctx, ConstI32Mat ids, std::int64_t num_experts,
                                     const ExpertsConfig& config);

/// out[t] = sum over slots a, in order, of weights[t, a] * y[t * A + a]: one fp32 chain. Slots
/// whose id is no expert are skipped. Then the norm; without one, `out` is wanted.   Shapes: out,
/// norm.y [T, DX]; y [T*A, DX]; ids, weights [T, A].
struct CombineSlots {
  F32Mat out;
  RowNorm norm;
  ConstF32Mat y;
  ConstI32Mat ids;
  ConstF32Mat weights;
  std::int64_t num_experts;
};
void combine_pairs(const ExecCtx& ctx, const CombineSlots& args);

}  // namespace tandem::cuda
