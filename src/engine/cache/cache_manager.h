// cache_manager.h — the cache memory of a model and who holds which part of it.
//
// A sequence owns one state slot and the pages of its tokens (SeqCache). Pages and slot are taken
// before the step that writes them and given back as a whole: when the sequence finishes, is
// aborted, or is preempted (its tokens are then computed again). Forking shares the full pages of a
// common prefix and copies what the two will write differently: the last partial page (with a
// prefix tree the pages of the last partial block) and the state slot.
//
// Beginnings that were computed before stay in a PrefixTree (docs/prefix_cache.md). A sequence that
// opens on one shares its pages, starts from a copy of its checkpoint, and leaves checkpoints of
// its own: copies of its state at the places of SeqCache::checkpoint_at and, in decode, at the last
// multiple of the tree's blocks. They come into the tree once a token was drawn from finite
// logits. What only the tree holds counts as available: it is evicted when pages run out.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/cache/page_pool.h"
#include "engine/cache/prefix_snapshot.h"
#include "engine/cache/prefix_tree.h"
#include "engine/cache/state_pool.h"
#include "models/cache_spec.h"

namespace tandem {

/// A copy of a sequence's state after `length` tokens that is not in the tree yet.
struct PendingCheckpoint {
  SlotId slot{};
  std::int64_t length = 0;
};

/// Checkpoints of one prompt, at most: where it leaves what is known, at its end, and on the way.
inline constexpr std::size_t kMostCheckpoints = 7;

/// The part of the caches one sequence holds. Filled by the CacheManager only.
struct SeqCache {
  std::vector<PageId> pages;   // page i holds tokens [i * page_size, (i + 1) * page_size)
  std::optional<SlotId> slot;  // none: the sequence holds nothing
  std::int64_t length = 0;     // tokens computed: rows written, state advanced

  std::optional<NodeId> node;  // of the tree, locked: the first pages are those of the way to it
  std::array<std::int64_t, kMostCheckpoints>
      checkpoint_at{};  // lengths at which the prefill pauses; 0: none
  std::array<PendingCheckpoint, kMostCheckpoints> pending =
      {};  // the first num_pending, in order of length
  std::int64_t num_pending = 0;
  std::int64_t publish_length = 0;  // tokens whose rows come into the tree, with `pending`
  bool has_drawn = false;           // a token, from finite logits, since it was opened

  /// Tokens the next chunk may have, of `count` that are pending.
  [[nodiscard]] std::int64_t until_checkpoint(std::int64_t count) const;
};

class CacheManager {
 public:
  /// Errors: std::bad_alloc, or what the device throws.
  CacheManager(const CacheSpec& spec, std::int64_t num_pages, std::int64_t page_size,
               std::int64_t num_slots, Device& device = host_device(),
               PrefixTreeLimits prefixes = {});

  CacheManager(const CacheManager&) = delete;  // the tree refers to the pools
  CacheManager& operator=(const CacheManager&) = delete;

  [[nodiscard]] const CacheBuffers& buffers() const { return buffers_; }
  [[nodiscard]] std::int64_t page_size() const { return pages_.page_size(); }
  [[nodiscard]] std::int64_t num_free_pages() const { return pages_.num_free(); }
  /// Free ones and those that only the tree holds.
  [[nodiscard]] std::int64_t num_available_pages() const {
    return pages_.num_free() + tree_.num_evictable_pages();
  }
  /// Of sequences; checkpoints have slots of their own.
  [[nodiscard]] std::int64_t num_free_slots() const {
    return slots_.num_free() - tree_.num_reserved_slots();
  }
  [[nodiscard]] std::int64_t pages_for(std::int64_t num_tokens) const;
  [[nodiscard]] const PrefixTree& tree() const { return tree_; }

  // Each gives all or nothing, false when pages or slots are short or when fewer than `spare` pages
  // would stay available. No allocation of memory as long as seq.pages has the capacity.
  /// A slot and pages for `num_tokens`, for a sequence that holds nothing. It starts at
  /// match.state_len; `match` is what the tree gave since it last changed.
  [[nodiscard]] bool open(SeqCache& seq, std::int64_t num_tokens, const PrefixMatch& match = {},
                          std::int64_t spare = 0);
  /// A slot and the pages that are not shared of a prefix of `num_tokens`, so that fork() cannot
  /// fail.
  [[nodiscard]] bool open_fork(SeqCache& seq, std::int64_t num_tokens, std::int64_t spare = 0);
  /// Pages so that `num_tokens` fit.
  [[nodiscard]] bool extend(SeqCache& seq, std::int64_t num_tokens, std::int64_t spare = 0);

  /// `child`, opened for a fork of parent.length tokens, becomes equal to `parent`, which has drawn
  /// nothing. Both will publish what they share, so that it is locked as long as one runs.
  void fork(SeqCache& child, SeqCache& parent);
  /// Gives everything back; a sequence that holds nothing is left as it is.
  void release(SeqCache& seq);

  /// `count` tokens more were computed; keeps a copy of the state where a checkpoint belongs.
  void advance(SeqCache& seq, std::int64_t count);
  /// A token was drawn from finite logits, so the rows before it are sound: the sequence's pending
  /// checkpoints, with the rows up to them, come into the tree. `tokens`: at least those computed.
  void confirm(SeqCache& seq, std::span<const std::int32_t> tokens, const CacheSalt& salt);
  /// Releases the sequence, its last pending checkpoint to the tree if a token was drawn.
  void retire(SeqCache& seq, std::span<const std::int32_t> tokens, const CacheSalt& salt);
  /// Forgets all beginnings; no sequence may use any.
  void clear_tree() { tree_.clear(); }
  // As prefix_snapshot.h says.
  SnapshotCounts save_tree(const SnapshotKey& key, SnapshotWriter& writer) {
    return save_prefix_snapshot({pages_, slots_, tree_}, key, writer);
  }
  [[nodiscard]] Expected<LoadedSnapshot> load_tree(const SnapshotKey& key, SnapshotReader& reader) {
    return load_prefix_snapshot({pages_, slots_, tree_}, key, reader);
  }

  /// Row of the latent buffers for token `position`, which is about to be written.
  [[nodiscard]] std::int64_t row_to_write(const SeqCache& seq, std::int64_t position) const;

  /// Free + owned = total; every reference of a page and every slot is held by one of `live` or the
  /// tree.
  void check_integrity(std::span<const SeqCache* const> live) const;

 private:
  /// Pages of a prefix of `num_tokens` that forks share.
  [[nodiscard]] std::int64_t shared_pages(std::int64_t num_tokens) const {
    const std::int64_t unit = std::max(tree_.limits().block_tokens, page_size());
    return num_tokens / unit * (unit / page_size());
  }
  /// Decides where a sequence that was just opened leaves checkpoints.
  void choose_checkpoints(SeqCache& seq, std::int64_t num_tokens, std::int64_t kv_len) const;
  void copy_state(SeqCache& seq);
  void publish(SeqCache& seq, std::span<const std::int32_t> tokens, const CacheSalt& salt);

  PagePool pages_;
  StatePool slots_;
  PrefixTree tree_;
  CacheBuffers buffers_;
};

}  // namespace tandem
