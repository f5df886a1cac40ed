// check_seqs.h — what the op wrappers check of a cut into sequences.
#pragma once

#include "ops/exec_ctx.h"
#include "ops/seq_batch.h"

namespace tandem {

/// cu_seqlens rise from 0 to `rows`; state slots, where there are any, are -1 or below `num_slots`.
inline void check_seqs(const ExecCtx& ctx, const SeqBatch& seqs, std::int64_t rows,
                       std::int64_t num_slots = 0) {
  TDM_CHECK(seqs.cu_seqlens.size(0) >= 1, seqs.cu_seqlens.size(0));
  TDM_CHECK(!seqs.keeps_state() || seqs.state_slots.size(0) == seqs.num_seqs(),
            seqs.state_slots.size(0), seqs.num_seqs());
  TDM_CHECK(!seqs.one_row_each || seqs.num_seqs() == rows, seqs.num_seqs(), rows);
  if (!ctx.host_reads()) {
    return;
  }
  TDM_CHECK(seqs.cu_seqlens(0) == 0 && seqs.num_rows() == rows, seqs.cu_seqlens(0), seqs.num_rows(),
            rows);
  for (std::int64_t b = 0; b < seqs.num_seqs(); ++b) {
    TDM_CHECK(seqs.length(b) >= 0, b, seqs.length(b));
    TDM_CHECK(!seqs.one_row_each || seqs.length(b) == 1, b, seqs.length(b));
    if (seqs.keeps_state()) {
      const std::int64_t slot = seqs.state_slots(b);
      TDM_CHECK(slot >= -1 && slot < num_slots, b, slot, num_slots);
    }
  }
}

}  // namespace tandem
