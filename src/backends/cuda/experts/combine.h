// combine.h — rows of pairs back to rows of tokens.
#pragma once

#include "backends/cuda/experts/group.h"
#include "ops/moe.h"

namespace tandem::cuda {

/// out[t] = the chain fma(weights[t, a], rows[position of (t, a)], sum) over slots a from 0; a null
/// `weights` means all 1. Pairs without a position are left out. Then the norm; without one, `out`
/// is wanted.   Shapes: out, norm.y [T, D], rows [T*A, D], weights [T, A].
void combine_slots(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, ConstF32Mat rows,
                   const ExpertGroups& groups, std::int64_t slots, const ConstF32Mat* weights);

/// saved.pair_of_slot [T, A].
void save_positions(const ExecCtx& ctx, I32Mat pair_of_slot, const ExpertGroups& groups);

}  // namespace tandem::cuda
