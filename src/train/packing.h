// packing.h — from sequences to packed micro-batches.   Source: rl.md 3.4.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tandem {

/// One training sequence: all its tokens, and which of them are predicted and trained.
struct TrainSequence {
  std::span<const std::int32_t> tokens;
  std::int64_t num_prompt = 0;  // tokens [num_prompt, end) are targets
};

/// Whole sequences packed into rows. The last token of a sequence is never fed: row i predicts the
/// token after it.
struct MicroBatch {
  std::vector<std::int32_t> token_ids;   // [T]
  std::vector<std::int32_t> cu_seqlens;  // [B+1]
  std::vector<std::int32_t> rows;        // [R] rows whose next token is a target, ascending
  std::vector<std::int32_t> targets;     // [R] those tokens
  std::vector<std::int64_t>
      cu_targets;  // [B+1] targets of sequence b are cu_targets[b] .. cu_targets[b+1]-1
  std::vector<std::int64_t> sequences;  // [B] index of each sequence in the caller's list
};

/// Fills micro-batches in the given order, each up to `max_tokens` rows; a longer sequence gets one
/// of its own. The cut changes memory and speed, never what is computed for a sequence.
[[nodiscard]] std::vector<MicroBatch> pack_sequences(std::span<const TrainSequence> sequences,
                                                     std::int64_t max_tokens);

}  // namespace tandem
