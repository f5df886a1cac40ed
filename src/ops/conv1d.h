// conv1d.h — causal depthwise short convolution followed by SiLU.   Source: kimi-k3.md 4.2.
#pragma once

#include <cstdint>
#include <span>

#include "ops/exec_ctx.h"
#include "ops/seq_batch.h"
#include "tensor/view.h"

namespace tandem {

/// Filters of one call.
inline constexpr std::int64_t kMaxConvFilters = 4;

struct ConvOps {
  void (*conv1d)(const ExecCtx&, F32Mat y, ConstF32Mat x, std::span<const ConstF32Mat> filters,
                 F32Cube state, const SeqBatch& seqs);
  void (*conv1d_bwd)(const ExecCtx&, F32Mat d_x, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x,
                     ConstF32Mat w, const SeqBatch& seqs);
};

namespace ops {

/// y[t, c] = SiLU( sum_j w[c, j] x[t - (W-1) + j, c] ), tap W-1 multiplies the current token.
/// w is the filters one below the other: each is a parameter of its own, for its columns of x.
/// Shapes: y, x [T, C]; filters F of [C/F, W], F <= kMaxConvFilters; state [slots, W-1, C], the
/// last W-1 raw inputs of each sequence, oldest first: read as the
///         rows before the first one and left holding the last W-1 inputs of this call. Without
///         slots: zeros, and dropped.
/// Aliasing: none.
void conv1d(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, std::span<const ConstF32Mat> filters,
            F32Cube state, const SeqBatch& seqs);
/// Of one filter w [C, W]. Training batches only (sequences start from zeros). d_x is overwritten,
/// d_w accumulated.
void conv1d_bwd(const ExecCtx& ctx, F32Mat d_x, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x,
                ConstF32Mat w, const SeqBatch& seqs);

}  // namespace ops
}  // namespace tandem
