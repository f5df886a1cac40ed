// conv1d_bwd.h — backward pass of the convolution, for conv1d.cu's table.   Contract: ops/conv1d.h
#pragma once

#include "ops/exec_ctx.h"
#include "ops/seq_batch.h"
#include "tensor/view.h"

namespace tandem::cuda {

void conv1d_bwd(const ExecCtx& ctx, F32Mat d_x, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x,
                ConstF32Mat w, const SeqBatch& seqs);

}  // namespace tandem::cuda
