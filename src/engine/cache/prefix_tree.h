// prefix_tree.h — beginnings of sequences that were computed before, by their token ids.
//
// A tree of blocks of `block_tokens` ids. A node stands for all tokens from the root to its end; it
// holds a reference to each page of its own block and, optionally, a checkpoint: a copy of the
// recurrent state after exactly these tokens. Latent rows without a state are of no use to a hybrid
// model, so what can be resumed is the deepest node with a checkpoint, and a node that has none,
// nothing below it and nobody using it is removed.
//
// Sequences lock the node their pages come from; a locked node and all above it stay. Everything
// else may be evicted, least recently used checkpoint first. The tree belongs to one state of the
// weights: clear() when they change. No call but those that say so takes memory from the heap.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/cache/page_pool.h"
#include "engine/cache/state_pool.h"
#include "engine/ids.h"

namespace tandem {

/// Namespace inside a tree; null: the common one.
using CacheSalt = std::shared_ptr<const std::string>;

/// What a tree knows of a sequence's beginning, in tokens.
struct PrefixMatch {
  std::int64_t kv_len = 0;     // whose latent rows are there
  std::int64_t state_len = 0;  // the longest part of them that ends at a checkpoint
  std::optional<NodeId> node;  // that ends there; none when state_len is 0
};

/// A node as others may read it.
struct PrefixBlock {
  std::optional<NodeId> parent;
  std::int64_t depth = 0;                // tokens from the root to its end
  CacheSalt salt;                        // of a first block
  std::span<const std::int32_t> tokens;  // block_tokens of them
  std::span<const PageId> pages;
  std::optional<SlotId> state;  // the checkpoint
};

struct PrefixTreeLimits {
  std::int64_t block_tokens = 0;  // multiple of the page size; 0: no tree, nothing ever matches
  std::int64_t num_checkpoints = 0;
};

class PrefixTree {
 public:
  /// The pools outlive the tree. Takes all the memory it will ever need.
  PrefixTree(PagePool& pages, StatePool& slots, PrefixTreeLimits limits);

  [[nodiscard]] const PrefixTreeLimits& limits() const { return limits_; }
  [[nodiscard]] std::int64_t num_pages() const { return num_nodes_ * pages_per_block_; }
  /// Pages that evicting everything nobody uses would free.
  [[nodiscard]] std::int64_t num_evictable_pages() const {
    return (num_nodes_ - num_locked_) * pages_per_block_;
  }
  /// Slots of checkpoints in the tree.
  [[nodiscard]] std::int64_t num_checkpoints() const { return isize(checkpoints_); }
  /// Slots taken for checkpoints that are not in the tree yet.
  [[nodiscard]] std::int64_t num_pending() const { return num_pending_; }
  /// Slots of the pool that only checkpoints may take.
  [[nodiscard]] std::int64_t num_reserved_slots() const {
    return limits_.num_checkpoints - num_checkpoints() - num_pending_;
  }
  /// Evicted for want of room or use: not by clear().
  [[nodiscard]] std::int64_t num_evicted_pages() const { return num_evicted_pages_; }
  [[nodiscard]] std::int64_t num_evicted_checkpoints() const { return num_evicted_checkpoints_; }

  /// The longest known beginning of `tokens`. Changes nothing.
  [[nodiscard]] PrefixMatch match(std::span<const std::int32_t> tokens,
                                  const CacheSalt& salt) const;
  /// Adds the blocks of `tokens`, whole blocks only, that are missing, with the pages that hold
  /// them. Where the tree has a block already, `pages` changes over to the tree's (the rows are the
  /// same bits) and gives its own back. Returns the last block's node, locked.
  [[nodiscard]] NodeId insert(std::span<const std::int32_t> tokens, const CacheSalt& salt,
                              std::span<PageId> pages);
  /// Appends the pages of the way to `node`, with a reference to each.
  void append_pages(std::vector<PageId>& pages, NodeId node);
  void lock(NodeId node);
  void unlock(NodeId node);

  /// A slot for a checkpoint, as a copy of `state`; evicts another checkpoint if there must be.
  /// None: all are pending.
  [[nodiscard]] std::optional<SlotId> take_checkpoint(SlotId state);
  /// Gives back a slot that did not come into the tree.
  void drop_checkpoint(SlotId slot);
  /// The checkpoint becomes that of the node `depth` tokens deep on the way to `below`, unless that
  /// node has one: then the slot is given back.
  void attach(NodeId below, std::int64_t depth, SlotId slot);
  [[nodiscard]] std::optional<SlotId> checkpoint(NodeId node) const { return at(node).state; }
  /// The node's checkpoint is now the most recently used one.
  void touch(NodeId node) { at(node).last_use = ++clock_; }

  // For a snapshot (prefix_snapshot.h).
  [[nodiscard]] PrefixBlock block(NodeId node) const;
  /// Nodes with a checkpoint, the most recently used one first. Takes memory.
  [[nodiscard]] std::vector<NodeId> checkpoints_by_use() const;
  /// Blocks that a tree without any has room for now.
  [[nodiscard]] std::int64_t max_blocks() const;
  /// Adds one block below `parent` with a reference to each of its pages; none: it is there
  /// already. Until a checkpoint is attached at or below it the block is of no use, which the tree
  /// only bears with until then, or until clear().
  [[nodiscard]] std::optional<NodeId> restore(std::optional<NodeId> parent,
                                              std::span<const std::int32_t> tokens,
                                              const CacheSalt& salt, std::span<const PageId> pages);
  /// A zeroed slot for a checkpoint, pending; one must be reserved.
  [[nodiscard]] SlotId take_empty_checkpoint();

  /// Frees the least recently used end of a path that nobody uses; false when there is none.
  bool evict();
  /// Evicts everything; nothing may be locked.
  void clear();

  /// Adds one for each page the tree holds, and marks its slots. Checks the structure, and that
  /// its locks are those of `locked`, one an entry.
  void check_integrity(std::span<std::int32_t> page_references, std::vector<bool>& slot_used,
                       std::span<const NodeId> locked) const;
  /// Whether `pages` begins with the pages of the way to `node`.
  [[nodiscard]] bool begins_with(std::span<const PageId> pages, NodeId node) const;

 private:
  struct Node {
    std::uint64_t key = 0;  // hash of the parent, the salt and the tokens
    std::optional<NodeId> parent;
    std::optional<NodeId> next_in_bucket;
    std::int64_t depth = 0;  // tokens from the root to its end; 0: not in use
    std::int32_t num_children = 0;
    std::int32_t num_locks = 0;   // of it and the nodes below
    std::optional<SlotId> state;  // the checkpoint
    std::uint64_t last_use = 0;   // of the checkpoint
    CacheSalt salt;               // of a first block
  };

  [[nodiscard]] Node& at(NodeId id) { return nodes_[usize(index_of(id))]; }
  [[nodiscard]] const Node& at(NodeId id) const { return nodes_[usize(index_of(id))]; }
  [[nodiscard]] std::span<const std::int32_t> tokens_of(NodeId id) const;
  [[nodiscard]] std::span<const PageId> pages_of(NodeId id) const;
  [[nodiscard]] std::optional<NodeId> find(std::uint64_t key, std::optional<NodeId> parent,
                                           std::span<const std::int32_t> block,
                                           const CacheSalt& salt) const;
  [[nodiscard]] NodeId add(std::uint64_t key, std::optional<NodeId> parent,
                           std::span<const std::int32_t> block, const CacheSalt& salt,
                           std::span<const PageId> pages);
  void remove(NodeId id);
  /// Removes the node and then those above it while they are of no use.
  void prune(std::optional<NodeId> id);
  void drop_state(NodeId id);
  [[nodiscard]] std::optional<NodeId> oldest_checkpoint(bool unused_ends_only) const;
  [[nodiscard]] std::optional<NodeId>& bucket(std::uint64_t key) {
    return buckets_[key % buckets_.size()];
  }

  PagePool& pages_;
  StatePool& slots_;
  PrefixTreeLimits limits_;
  std::int64_t pages_per_block_ = 0;
  FreeList free_nodes_;
  std::vector<Node> nodes_;
  std::vector<std::int32_t> tokens_;            // [nodes, block_tokens]
  std::vector<PageId> node_pages_;              // [nodes, pages of a block]
  std::vector<std::optional<NodeId>> buckets_;  // heads of chains
  std::vector<NodeId> checkpoints_;             // nodes that have one, in no order
  std::int64_t num_nodes_ = 0;
  std::int64_t num_locked_ = 0;  // nodes with locks
  std::int64_t num_pending_ = 0;
  std::uint64_t clock_ = 0;
  std::int64_t num_evicted_pages_ = 0;
  std::int64_t num_evicted_checkpoints_ = 0;
};

}  // namespace tandem
