// cache_manager.h — the cache memory of a model and who holds which part of it.
//
// A sequence owns one state slot and the pages of its tokens (SeqCache). Pages and slot are taken
// before the step that writes them and given back as a whole: when the sequence finishes, is
// aborted, or is preempted (its tokens are then computed again). Forking shares the full pages of a
// common prefix and copies what the two will write differently: the last partial page and the state
// slot.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/cache/page_pool.h"
#include "engine/cache/state_pool.h"
#include "models/cache_spec.h"

namespace tandem {

/// The part of the caches one sequence holds. Filled by the CacheManager only.
struct SeqCache {
  std::vector<PageId> pages;   // page i holds tokens [i * page_size, (i + 1) * page_size)
  std::optional<SlotId> slot;  // none: the sequence holds nothing
  std::int64_t length = 0;     // tokens computed: rows written, state advanced
};

class CacheManager {
 public:
  /// Errors: std::bad_alloc, or what the device throws.
  CacheManager(const CacheSpec& spec, std::int64_t num_pages, std::int64_t page_size,
               std::int64_t num_slots, Device& device = host_device());

  [[nodiscard]] const CacheBuffers& buffers() const { return buffers_; }
  [[nodiscard]] std::int64_t page_size() const { return pages_.page_size(); }
  [[nodiscard]] std::int64_t num_free_pages() const { return pages_.num_free(); }
  [[nodiscard]] std::int64_t num_free_slots() const { return slots_.num_free(); }
  [[nodiscard]] std::int64_t pages_for(std::int64_t num_tokens) const;

  // Each gives all or nothing, false when pages or slots are short. No allocation of memory as long
  // as seq.pages has the capacity.
  /// A zeroed slot and pages for `num_tokens`, for a sequence that holds nothing.
  [[nodiscard]] bool open(SeqCache& seq, std::int64_t num_tokens);
  /// A slot and the partial last page of a prefix of `num_tokens`, so that fork() cannot fail.
  [[nodiscard]] bool open_fork(SeqCache& seq, std::int64_t num_tokens);
  /// Pages so that `num_tokens` fit.
  [[nodiscard]] bool extend(SeqCache& seq, std::int64_t num_tokens);

  /// `child`, opened for a fork of parent.length tokens, becomes equal to `parent`.
  void fork(SeqCache& child, const SeqCache& parent);
  /// Gives everything back; a sequence that holds nothing is left as it is.
  void release(SeqCache& seq);

  /// Row of the latent buffers for token `position`, which is about to be written.
  [[nodiscard]] std::int64_t row_to_write(const SeqCache& seq, std::int64_t position) const;

  /// Free + owned = total; every reference of a page and every slot is held by one of `live`.
  void check_integrity(std::span<const SeqCache* const> live) const;

 private:
  PagePool pages_;
  StatePool slots_;
  CacheBuffers buffers_;
};

}  // namespace tandem
