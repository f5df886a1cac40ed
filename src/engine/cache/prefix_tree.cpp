#include "engine/cache/prefix_tree.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "core/rng.h"

namespace tandem {
namespace {

bool same_salt(const CacheSalt& a, const CacheSalt& b) {
  return a == b || (a != nullptr && b != nullptr && *a == *b);
}

std::uint64_t hash_of(std::uint64_t parent_key, std::span<const std::int32_t> block) {
  std::uint64_t hash = parent_key;
  for (const std::int32_t token : block) {
    hash = (hash ^ static_cast<std::uint32_t>(token)) * 0x100000001B3ULL;
    hash ^= hash >> 29;
  }
  return mix_key({hash});
}

std::uint64_t root_key(const CacheSalt& salt) {
  return salt == nullptr ? 0 : mix_key({std::hash<std::string>{}(*salt), salt->size()});
}

std::int64_t most_nodes(const PagePool& pages, PrefixTreeLimits limits) {
  // Nodes hold pages of their own. Only ends with a checkpoint are kept, so without any there is
  // no node.
  const bool off = limits.block_tokens == 0 || limits.num_checkpoints == 0;
  return off ? 0 : pages.num_pages() / (limits.block_tokens / pages.page_size());
}

}  // namespace

PrefixTree::PrefixTree(PagePool& pages, StatePool& slots, PrefixTreeLimits limits)
    : pages_(pages),
      slots_(slots),
      limits_(limits),
      pages_per_block_(limits.block_tokens / pages.page_size()),
      free_nodes_(most_nodes(pages, limits)),
      nodes_(usize(free_nodes_.size())),
      tokens_(nodes_.size() * usize(limits.block_tokens)),
      node_pages_(nodes_.size() * usize(pages_per_block_)),
      buckets_(nodes_.size() + 1) {
  TDM_CHECK(limits.block_tokens % pages.page_size() == 0, limits.block_tokens, pages.page_size());
  checkpoints_.reserve(usize(limits.num_checkpoints));
}

std::span<const std::int32_t> PrefixTree::tokens_of(NodeId id) const {
  const std::size_t size = usize(limits_.block_tokens);
  return std::span(tokens_).subspan(usize(index_of(id)) * size, size);
}

std::span<const PageId> PrefixTree::pages_of(NodeId id) const {
  const std::size_t size = usize(pages_per_block_);
  return std::span(node_pages_).subspan(usize(index_of(id)) * size, size);
}

std::optional<NodeId> PrefixTree::find(std::uint64_t key, std::optional<NodeId> parent,
                                       std::span<const std::int32_t> block,
                                       const CacheSalt& salt) const {
  std::optional<NodeId> id = buckets_[key % buckets_.size()];
  while (id) {
    const Node& node = at(*id);
    if (node.key == key && node.parent == parent && (parent || same_salt(node.salt, salt)) &&
        std::ranges::equal(tokens_of(*id), block)) {
      return id;
    }
    id = node.next_in_bucket;
  }
  return std::nullopt;
}

PrefixMatch PrefixTree::match(std::span<const std::int32_t> tokens, const CacheSalt& salt) const {
  PrefixMatch match;
  if (num_nodes_ == 0) {
    return match;
  }
  std::uint64_t key = root_key(salt);
  std::optional<NodeId> id;
  const std::size_t size = usize(limits_.block_tokens);
  for (std::size_t begin = 0; begin + size <= tokens.size(); begin += size) {
    const std::span<const std::int32_t> block = tokens.subspan(begin, size);
    key = hash_of(key, block);
    id = find(key, id, block, salt);
    if (!id) {
      break;
    }
    const Node& node = at(*id);
    match.kv_len = isize(tokens.first(begin + size));
    TDM_CHECK(node.depth == match.kv_len, node.depth, match.kv_len);
    if (node.state) {
      match.state_len = match.kv_len;
      match.node = id;
    }
  }
  return match;
}

NodeId PrefixTree::insert(std::span<const std::int32_t> tokens, const CacheSalt& salt,
                          std::span<PageId> pages) {
  const std::size_t size = usize(limits_.block_tokens);
  TDM_CHECK(!tokens.empty() && tokens.size() % size == 0, tokens.size(), size);
  std::uint64_t key = root_key(salt);
  std::optional<NodeId> id;
  for (std::size_t begin = 0; begin < tokens.size(); begin += size) {
    const std::span<const std::int32_t> block = tokens.subspan(begin, size);
    const std::span<PageId> own =
        pages.subspan(begin / size * usize(pages_per_block_), usize(pages_per_block_));
    key = hash_of(key, block);
    const std::optional<NodeId> parent = id;
    id = find(key, parent, block, salt);
    if (!id) {
      id = add(key, parent, block, salt, own);
      continue;
    }
    for (std::size_t i = 0; i < own.size(); ++i) {
      const PageId page = pages_of(*id)[i];
      pages_.share(page);
      pages_.release(std::exchange(own[i], page));
    }
  }
  lock(*id);
  return *id;
}

NodeId PrefixTree::add(std::uint64_t key, std::optional<NodeId> parent,
                       std::span<const std::int32_t> block, const CacheSalt& salt,
                       std::span<const PageId> pages) {
  const NodeId id{free_nodes_.take()};
  Node& node = at(id);
  node.key = key;
  node.parent = parent;
  node.depth = (parent ? at(*parent).depth : 0) + limits_.block_tokens;
  node.salt = parent ? nullptr : salt;
  node.next_in_bucket = std::exchange(bucket(key), id);
  std::ranges::copy(block, tokens_.begin() + index_of(id) * limits_.block_tokens);
  std::ranges::copy(pages, node_pages_.begin() + index_of(id) * pages_per_block_);
  for (const PageId page : pages) {
    pages_.share(page);
  }
  if (parent) {
    ++at(*parent).num_children;
  }
  ++num_nodes_;
  return id;
}

void PrefixTree::remove(NodeId id) {
  Node& node = at(id);
  TDM_CHECK(node.num_children == 0 && node.num_locks == 0 && !node.state, index_of(id));
  for (const PageId page : pages_of(id)) {
    pages_.release(page);
  }
  std::optional<NodeId>* link = &bucket(node.key);
  while (*link != id) {
    link = &at(**link).next_in_bucket;
  }
  *link = node.next_in_bucket;
  if (node.parent) {
    --at(*node.parent).num_children;
  }
  node = {};
  free_nodes_.put(static_cast<std::int32_t>(id));
  --num_nodes_;
  num_evicted_pages_ += pages_per_block_;
}

void PrefixTree::prune(std::optional<NodeId> id) {
  while (id) {
    const Node& node = at(*id);
    if (node.num_children > 0 || node.num_locks > 0 || node.state) {
      return;
    }
    const std::optional<NodeId> parent = node.parent;
    remove(*id);
    id = parent;
  }
}

void PrefixTree::append_pages(std::vector<PageId>& pages, NodeId node) {
  const std::size_t begin = pages.size();
  pages.resize(begin + usize(at(node).depth / pages_.page_size()));
  auto end = pages.end();
  for (std::optional<NodeId> id = node; id; id = at(*id).parent) {
    end = std::ranges::copy_backward(pages_of(*id), end).out;
  }
  for (std::size_t i = begin; i < pages.size(); ++i) {
    pages_.share(pages[i]);
  }
}

void PrefixTree::lock(NodeId node) {
  for (std::optional<NodeId> id = node; id; id = at(*id).parent) {
    num_locked_ += at(*id).num_locks++ == 0 ? 1 : 0;
  }
}

void PrefixTree::unlock(NodeId node) {
  for (std::optional<NodeId> id = node; id; id = at(*id).parent) {
    TDM_CHECK(at(*id).num_locks > 0, index_of(*id));
    num_locked_ -= --at(*id).num_locks == 0 ? 1 : 0;
  }
  prune(node);
}

std::optional<SlotId> PrefixTree::take_checkpoint(SlotId state) {
  if (num_reserved_slots() == 0) {
    const std::optional<NodeId> oldest = oldest_checkpoint(false);
    if (!oldest) {
      return std::nullopt;
    }
    drop_state(*oldest);
    prune(oldest);
  }
  ++num_pending_;
  return slots_.take_copy(state);
}

void PrefixTree::drop_checkpoint(SlotId slot) {
  slots_.release(slot);
  --num_pending_;
}

void PrefixTree::attach(NodeId below, std::int64_t depth, SlotId slot) {
  NodeId id = below;
  while (at(id).depth > depth) {
    id = at(id).parent.value();
  }
  TDM_CHECK(at(id).depth == depth, at(id).depth, depth);
  if (!at(id).state) {
    at(id).state = slot;
    checkpoints_.push_back(id);
    --num_pending_;
  } else {
    drop_checkpoint(slot);
  }
  touch(id);
}

void PrefixTree::drop_state(NodeId id) {
  slots_.release(at(id).state.value());
  at(id).state.reset();
  *std::ranges::find(checkpoints_, id) = checkpoints_.back();
  checkpoints_.pop_back();
  ++num_evicted_checkpoints_;
}

std::optional<NodeId> PrefixTree::oldest_checkpoint(bool unused_ends_only) const {
  std::optional<NodeId> oldest;
  for (const NodeId id : checkpoints_) {
    const Node& node = at(id);
    if (unused_ends_only && (node.num_children > 0 || node.num_locks > 0)) {
      continue;
    }
    if (!oldest || node.last_use < at(*oldest).last_use) {
      oldest = id;
    }
  }
  return oldest;
}

PrefixBlock PrefixTree::block(NodeId node) const {
  const Node& of = at(node);
  return {of.parent, of.depth, of.salt, tokens_of(node), pages_of(node), of.state};
}

std::vector<NodeId> PrefixTree::checkpoints_by_use() const {
  std::vector<NodeId> nodes = checkpoints_;
  std::ranges::sort(nodes, std::greater<>{}, [this](NodeId id) { return at(id).last_use; });
  return nodes;
}

std::int64_t PrefixTree::max_blocks() const {
  return pages_per_block_ == 0 ? 0
                               : std::min(free_nodes_.size(), pages_.num_free() / pages_per_block_);
}

std::optional<NodeId> PrefixTree::restore(std::optional<NodeId> parent,
                                          std::span<const std::int32_t> tokens,
                                          const CacheSalt& salt, std::span<const PageId> pages) {
  TDM_CHECK(isize(tokens) == limits_.block_tokens && isize(pages) == pages_per_block_,
            tokens.size(), pages.size());
  const std::uint64_t key = hash_of(parent ? at(*parent).key : root_key(salt), tokens);
  if (find(key, parent, tokens, salt)) {
    return std::nullopt;
  }
  return add(key, parent, tokens, salt, pages);
}

SlotId PrefixTree::take_empty_checkpoint() {
  TDM_CHECK(num_reserved_slots() > 0, num_pending_);
  ++num_pending_;
  return slots_.take();
}

bool PrefixTree::evict() {
  const std::optional<NodeId> oldest = oldest_checkpoint(true);
  if (!oldest) {
    return false;
  }
  drop_state(*oldest);
  prune(oldest);
  return true;
}

void PrefixTree::clear() {
  const std::int64_t pages = num_evicted_pages_;
  const std::int64_t checkpoints = num_evicted_checkpoints_;
  while (evict()) {
  }
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].depth > 0) {
      prune(NodeId{static_cast<std::int32_t>(i)});  // of a snapshot that ended early
    }
  }
  num_evicted_pages_ = pages;
  num_evicted_checkpoints_ = checkpoints;
  TDM_CHECK(num_nodes_ == 0, num_nodes_, num_locked_);
}

bool PrefixTree::begins_with(std::span<const PageId> pages, NodeId node) const {
  for (std::optional<NodeId> id = node; id; id = at(*id).parent) {
    const std::int64_t end = at(*id).depth / pages_.page_size();
    if (end > isize(pages) ||
        !std::ranges::equal(
            pages_of(*id), pages.subspan(usize(end - pages_per_block_), usize(pages_per_block_)))) {
      return false;
    }
  }
  return true;
}

void PrefixTree::check_integrity(std::span<std::int32_t> page_references,
                                 std::vector<bool>& slot_used,
                                 std::span<const NodeId> locked) const {
  std::vector<std::int32_t> children(nodes_.size(), 0);
  std::vector<std::int32_t> locks(nodes_.size(), 0);
  for (const NodeId id : locked) {
    for (std::optional<NodeId> up = id; up; up = at(*up).parent) {
      ++locks[usize(index_of(*up))];
    }
  }
  std::vector<bool> page_seen(page_references.size(), false);
  std::int64_t num_nodes = 0;
  std::int64_t num_states = 0;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const NodeId id{static_cast<std::int32_t>(i)};
    const Node& node = nodes_[i];
    if (node.depth == 0) {
      continue;
    }
    ++num_nodes;
    TDM_CHECK(node.depth % limits_.block_tokens == 0, node.depth);
    TDM_CHECK(node.depth == (node.parent ? at(*node.parent).depth : 0) + limits_.block_tokens);
    TDM_CHECK(find(node.key, node.parent, tokens_of(id), node.salt) == id, i);
    if (node.parent) {
      ++children[usize(index_of(*node.parent))];
    }
    for (const PageId page : pages_of(id)) {
      TDM_CHECK(!page_seen[usize(index_of(page))], index_of(page));
      page_seen[usize(index_of(page))] = true;
      ++page_references[usize(index_of(page))];
    }
    if (node.state) {
      TDM_CHECK(std::ranges::count(checkpoints_, id) == 1, i);
      TDM_CHECK(!slot_used[usize(index_of(*node.state))], index_of(*node.state));
      slot_used[usize(index_of(*node.state))] = true;
      ++num_states;
    }
  }
  std::int64_t num_locked = 0;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    TDM_CHECK(node.num_children == children[i] && node.num_locks == locks[i], i, node.num_locks,
              locks[i]);
    TDM_CHECK(node.depth == 0 || node.num_children > 0 || node.num_locks > 0 || node.state, i);
    num_locked += locks[i] > 0 ? 1 : 0;
  }
  TDM_CHECK(num_nodes == num_nodes_ && num_nodes + free_nodes_.size() == isize(nodes_), num_nodes);
  TDM_CHECK(num_states == num_checkpoints() && num_locked == num_locked_, num_states, num_locked);
  TDM_CHECK(num_pending_ >= 0 && num_reserved_slots() >= 0, num_pending_);
}

}  // namespace tandem
