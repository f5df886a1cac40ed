#include "engine/batch.h"

#include <algorithm>

namespace tandem {

BatchBuilder::BatchBuilder(std::int64_t max_rows, std::int64_t max_seqs,
                           std::int64_t max_pages_per_seq)
    : token_ids_(usize(max_rows)),
      slot_mapping_(usize(max_rows)),
      cu_seqlens_(usize(max_seqs) + 1),
      state_slots_(usize(max_seqs)),
      kv_lens_(usize(max_seqs)),
      logit_rows_(usize(max_seqs)),
      page_table_(usize(max_seqs * max_pages_per_seq)) {}

ModelBatch BatchBuilder::build(std::span<const ScheduledChunk> chunks, const CacheManager& cache) {
  const std::int64_t num_seqs = isize(chunks);
  TDM_CHECK(num_seqs <= isize(state_slots_), num_seqs, state_slots_.size());
  std::int64_t max_pages = 0;
  for (const ScheduledChunk& chunk : chunks) {
    max_pages = std::max(max_pages, isize(chunk.seq->cache.pages));
  }
  std::int64_t row = 0;
  std::int64_t num_logits = 0;
  cu_seqlens_[0] = 0;
  for (std::int64_t b = 0; b < num_seqs; ++b) {
    const ScheduledChunk& chunk = chunks[usize(b)];
    const Sequence& seq = *chunk.seq;
    TDM_CHECK(row + chunk.count <= isize(token_ids_), row, chunk.count);
    for (std::int64_t i = 0; i < chunk.count; ++i, ++row) {
      const std::int64_t position = chunk.begin + i;
      token_ids_[usize(row)] = seq.all_tokens[usize(position)];
      slot_mapping_[usize(row)] =
          checked_cast<std::int32_t>(cache.row_to_write(seq.cache, position));
    }
    cu_seqlens_[usize(b) + 1] = checked_cast<std::int32_t>(row);
    state_slots_[usize(b)] = static_cast<std::int32_t>(seq.cache.slot.value());
    kv_lens_[usize(b)] = checked_cast<std::int32_t>(chunk.begin + chunk.count);
    if (chunk.samples()) {
      logit_rows_[usize(num_logits++)] = checked_cast<std::int32_t>(row - 1);
    }
    std::int32_t* table = page_table_.data() + b * max_pages;
    const auto pages_end = std::ranges::transform(seq.cache.pages, table, [](PageId page) {
                             return static_cast<std::int32_t>(page);
                           }).out;
    std::fill(pages_end, table + max_pages, -1);
  }
  return {.token_ids = {token_ids_.data(), {row}},
          .seqs = {.cu_seqlens = {cu_seqlens_.data(), {num_seqs + 1}},
                   .state_slots = {state_slots_.data(), {num_seqs}}},
          .kv_lens = {kv_lens_.data(), {num_seqs}},
          .slot_mapping = {slot_mapping_.data(), {row}},
          .page_table = {page_table_.data(), {num_seqs, max_pages}},
          .logit_rows = {logit_rows_.data(), {num_logits}}};
}

}  // namespace tandem
