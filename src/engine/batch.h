// batch.h — the flat arrays of a step, preallocated for the largest one and reused. They are built
// in host memory and, for a device that has its own, sent there in one piece.
#pragma once

#include <cstdint>
#include <span>

#include "engine/scheduler/scheduler.h"
#include "models/model.h"
#include "tensor/storage.h"

namespace tandem {

/// Extents a batch is padded to, so that steps of one bucket are the same launches. Padding
/// sequences have one row, slot -1, no keys, and a logits row that nobody reads.
struct BatchBucket {
  std::int64_t num_seqs = 0;   // 0: no padding
  std::int64_t num_pages = 0;  // columns of the page table

  auto operator<=>(const BatchBucket&) const = default;
};

/// Of an engine; on a device with memory of its own batches are padded to buckets.
[[nodiscard]] BatchLimits batch_limits(const EngineOptions& options, const Device& device);

class BatchBuilder {
 public:
  BatchBuilder(std::int64_t max_rows, std::int64_t max_seqs, std::int64_t max_pages_per_seq,
               Device& device);

  /// The most rows and sequences of a batch, padding included.
  [[nodiscard]] std::int64_t max_rows() const { return limits_.rows; }
  [[nodiscard]] std::int64_t max_seqs() const { return limits_.seqs; }
  /// The smallest bucket for a step of pure decodes: powers of two.
  [[nodiscard]] BatchBucket bucket_of(std::span<const ScheduledChunk> chunks) const;
  /// The batch of `chunks`: chunk b is sequence b; logit_rows are the scored rows of the chunks
  /// and the last rows of those that sample, in order. The views stay valid until the next call. No
  /// allocation.
  [[nodiscard]] ModelBatch build(std::span<const ScheduledChunk> chunks, const CacheManager& cache,
                                 BatchBucket bucket = {});

 private:
  // Offsets into the arrays, in int32: token_ids [T], slot_mapping [T], cu_seqlens [B+1],
  // state_slots [B], kv_lens [B], logit_rows [B], page_table [B, widest of the batch].
  struct Layout {
    std::int64_t token_ids, slot_mapping, cu_seqlens, state_slots, kv_lens, logit_rows, page_table;
  };

  Device& device_;
  BatchLimits limits_;
  Layout at_;
  Storage host_;       // on the device itself where the host sees it
  Storage on_device_;  // else this is
};

}  // namespace tandem
