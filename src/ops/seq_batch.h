// seq_batch.h — how a flat batch of token rows is cut into sequences.
#pragma once

#include "tensor/view.h"

namespace tandem {

struct SeqBatch {
  ConstI32Vec cu_seqlens;   // [B+1] int32, increasing from 0 to T: rows of sequence b are
                            // cu_seqlens[b] .. cu_seqlens[b+1]-1
  ConstI32Vec state_slots;  // [B] int32 slot of the state pools; -1 = padding: outputs are zero, no
                            // state is touched. Empty view: every sequence starts from a zero state
                            // and its final state is dropped (training)
  bool one_row_each = false;  // known by whoever built it: every sequence has exactly one row

  [[nodiscard]] std::int64_t num_seqs() const { return cu_seqlens.size(0) - 1; }
  [[nodiscard]] std::int64_t num_rows() const { return cu_seqlens(num_seqs()); }
  [[nodiscard]] std::int64_t begin(std::int64_t b) const { return cu_seqlens(b); }
  [[nodiscard]] std::int64_t length(std::int64_t b) const {
    return cu_seqlens(b + 1) - cu_seqlens(b);
  }
  [[nodiscard]] bool keeps_state() const { return state_slots.size(0) > 0; }
};

}  // namespace tandem
