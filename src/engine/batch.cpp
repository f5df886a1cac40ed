#include "engine/batch.h"

#include <algorithm>
#include <bit>

namespace tandem {
namespace {

std::int64_t power_of_two_at_least(std::int64_t n) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)));
}

std::int64_t widest_table(std::span<const ScheduledChunk> chunks) {
  std::int64_t pages = 0;
  for (const ScheduledChunk& chunk : chunks) {
    pages = std::max(pages, isize(chunk.seq->cache.pages));
  }
  return pages;
}

BatchLimits padded(BatchLimits limits, const Device& device) {
  if (!device.host_visible()) {
    limits.seqs = power_of_two_at_least(limits.seqs);
    limits.rows = std::max(limits.rows, limits.seqs);
    limits.pages_per_seq = power_of_two_at_least(limits.pages_per_seq);
  }
  return limits;
}

}  // namespace

BatchLimits batch_limits(const EngineOptions& options, const Device& device) {
  const std::int64_t pages = (options.max_seq_len + options.page_size - 1) / options.page_size;
  return padded({options.max_batch_tokens, options.num_seats(), pages}, device);
}

BatchBuilder::BatchBuilder(std::int64_t max_rows, std::int64_t max_seqs,
                           std::int64_t max_pages_per_seq, Device& device)
    : device_(device), limits_(padded({max_rows, max_seqs, max_pages_per_seq}, device)) {
  std::int64_t size = 0;
  const auto place = [&](std::int64_t count) { return std::exchange(size, size + count); };
  at_.token_ids = place(limits_.rows);
  at_.slot_mapping = place(limits_.rows);
  at_.cu_seqlens = place(limits_.seqs + 1);
  at_.state_slots = place(limits_.seqs);
  at_.kv_lens = place(limits_.seqs);
  at_.logit_rows = place(limits_.seqs);
  at_.page_table = place(limits_.seqs * limits_.pages_per_seq);
  host_ = Storage(size * 4, device.host_visible() ? device : host_device());
  if (!device.host_visible()) {
    on_device_ = Storage(size * 4, device);
  }
}

BatchBucket BatchBuilder::bucket_of(std::span<const ScheduledChunk> chunks) const {
  return {power_of_two_at_least(isize(chunks)),
          power_of_two_at_least(std::max<std::int64_t>(widest_table(chunks), 1))};
}

ModelBatch BatchBuilder::build(std::span<const ScheduledChunk> chunks, const CacheManager& cache,
                               BatchBucket bucket) {
  const std::int64_t num_seqs = std::max(isize(chunks), bucket.num_seqs);
  const std::int64_t num_pages = std::max(widest_table(chunks), bucket.num_pages);
  TDM_CHECK(num_seqs <= limits_.seqs && num_pages <= limits_.pages_per_seq, num_seqs, num_pages);
  std::int32_t* const base = host_.as<std::int32_t>().data();
  std::int32_t* const cu_seqlens = base + at_.cu_seqlens;
  std::int64_t row = 0;
  std::int64_t num_logits = 0;
  cu_seqlens[0] = 0;
  for (std::int64_t b = 0; b < num_seqs; ++b) {
    std::int32_t* const table = base + at_.page_table + b * num_pages;
    std::int32_t* table_end = table;
    if (b < isize(chunks)) {
      const ScheduledChunk& chunk = chunks[usize(b)];
      const Sequence& seq = *chunk.seq;
      TDM_CHECK(row + chunk.count <= limits_.rows, row, chunk.count);
      for (std::int64_t position = chunk.begin; position < chunk.begin + chunk.count; ++position) {
        base[at_.token_ids + row] = seq.all_tokens[usize(position)];
        base[at_.slot_mapping + row++] =
            checked_cast<std::int32_t>(cache.row_to_write(seq.cache, position));
      }
      base[at_.state_slots + b] = static_cast<std::int32_t>(seq.cache.slot.value());
      base[at_.kv_lens + b] = checked_cast<std::int32_t>(chunk.begin + chunk.count);
      table_end = std::ranges::transform(seq.cache.pages, table, [](PageId page) {
                    return static_cast<std::int32_t>(page);
                  }).out;
    } else {
      base[at_.token_ids + row] = 0;
      base[at_.slot_mapping + row++] = -1;
      base[at_.state_slots + b] = -1;
      base[at_.kv_lens + b] = 0;
    }
    std::fill(table_end, table + num_pages, -1);
    cu_seqlens[b + 1] = checked_cast<std::int32_t>(row);
    for (std::int64_t i = 0; b < isize(chunks) && i < chunks[usize(b)].num_scored; ++i) {
      const ScheduledChunk& chunk = chunks[usize(b)];
      const std::int64_t before_end = chunk.end() - (chunk.first_scored() + i);
      base[at_.logit_rows + num_logits++] = checked_cast<std::int32_t>(row - before_end);
    }
    if (b >= isize(chunks) || chunks[usize(b)].samples()) {
      base[at_.logit_rows + num_logits++] = checked_cast<std::int32_t>(row - 1);
    }
  }
  TDM_CHECK(num_logits <= limits_.seqs, num_logits, limits_.seqs);
  const bool one_row_each =
      std::ranges::all_of(chunks, [](const ScheduledChunk& chunk) { return chunk.count == 1; });
  const std::int32_t* data = base;
  if (!device_.host_visible()) {
    const std::int64_t used = at_.page_table + num_seqs * num_pages;
    device_.upload(on_device_.data(), base, usize(used) * sizeof(std::int32_t));
    data = on_device_.as<std::int32_t>().data();
  }
  return {.token_ids = {data + at_.token_ids, {row}},
          .seqs = {.cu_seqlens = {data + at_.cu_seqlens, {num_seqs + 1}},
                   .state_slots = {data + at_.state_slots, {num_seqs}},
                   .one_row_each = one_row_each},
          .kv_lens = {data + at_.kv_lens, {num_seqs}},
          .slot_mapping = {data + at_.slot_mapping, {row}},
          .page_table = {data + at_.page_table, {num_seqs, num_pages}},
          .logit_rows = {data + at_.logit_rows, {num_logits}}};
}

}  // namespace tandem
