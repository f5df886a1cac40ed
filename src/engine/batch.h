// batch.h — the flat arrays of a step, preallocated for the largest one and reused.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/scheduler/scheduler.h"
#include "models/model.h"

namespace tandem {

class BatchBuilder {
 public:
  BatchBuilder(std::int64_t max_rows, std::int64_t max_seqs, std::int64_t max_pages_per_seq);

  /// The batch of `chunks`: chunk b is sequence b; logit_rows are the last rows of the chunks that
  /// sample, in order. The views stay valid until the next call. No allocation.
  [[nodiscard]] ModelBatch build(std::span<const ScheduledChunk> chunks, const CacheManager& cache);

 private:
  std::vector<std::int32_t> token_ids_;     // [T]
  std::vector<std::int32_t> slot_mapping_;  // [T]
  std::vector<std::int32_t> cu_seqlens_;    // [B+1]
  std::vector<std::int32_t> state_slots_;   // [B]
  std::vector<std::int32_t> kv_lens_;       // [B]
  std::vector<std::int32_t> logit_rows_;    // [R], R <= B
  std::vector<std::int32_t> page_table_;    // [B, widest of the batch]
};

}  // namespace tandem
