// experts_exact.cpp — the routed experts forward: pairs grouped by expert, three grouped products,
// and a combination in slot order, as on the CPU.   Contract: ops/moe.h   Oracle: ops/ref/moe_ref.h
#include "backends/cuda/experts/combine.h"
#include "backends/cuda/experts/exact.h"
#include "backends/cuda/gemm/exact.h"
#include "ops/op_table.h"
#include "tensor/arena_views.h"

namespace tandem::cuda {
void exact_experts(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, const ExpertsSaved* saved,
                   ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights,
                   const ExpertWeights& experts, SituParams act) {
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t slots = ids.size(1);
  const std::int64_t pairs = ids.size(0) * slots;
  if (pairs == 0) {
    return;
  }
  const std::int64_t width = experts.w1[0].out;
  const ExpertGroups groups =
      group_by_expert(ctx, ids, static_cast<std::int64_t>(experts.w1.size()));
  const F32Mat gate = saved != nullptr ? saved->gate : take_mat(*ctx.workspace, pairs, width);
  const F32Mat up = saved != nullptr ? saved->up : take_mat(*ctx.workspace, pairs, width);
  const F32Mat expert_out =
      saved != nullptr ? saved->out : take_mat(*ctx.workspace, pairs, x.size(1));
  const F32Mat activated = saved != nullptr ? take_mat(*ctx.workspace, pairs, width) : gate;
  const GroupedRows rows{groups.expert_begin, nullptr, 1, pairs};
  GroupedRows tokens = rows;
  tokens.pairs = groups.pair_order;
  tokens.slots = static_cast<std::int32_t>(slots);

  exact_linear_grouped(ctx, gate, x, experts.w1, tokens, false);
  exact_linear_grouped(ctx, up, x, experts.w3, tokens, false);
  ctx.ops->act.situ(ctx, activated, gate, up, act);
  exact_linear_grouped(ctx, expert_out, activated, experts.w2, rows, false);
  combine_slots(ctx, out, norm, expert_out, groups, slots, &weights);
  if (saved != nullptr) {
    save_positions(ctx, saved->pair_of_slot, groups);
  }
}

}  // namespace tandem::cuda
