#include "text/grammar/mask_cache.h"

#include <algorithm>
#include <utility>

#include "core/checked_cast.h"

namespace tandem::grammar {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{64} << 20;  // of one cache; 2,000 masks of K3

// One walk over the trie for one key, from each of its start nodes.
class TrieWalk {
 public:
  TrieWalk(const Automaton& automaton, const TokenTrie& trie) : walker_(automaton), trie_(trie) {}

  void run(const MaskKey& key, const NodeSet& from) {
    for (const std::int32_t start : from.nodes) {
      graph_.truncate({});
      Reach& first = reach_at(0);
      if (key.call >= 0) {
        walker_.reach_after_call(key.call, key.need, key.left, graph_, first);
      } else {
        const Place place{key.state, FrameGraph::kBase};
        walker_.reach({&place, 1}, graph_, first);
      }
      if (first.leaves_base) {
        exits_.push_back(start);
      }
      walk_below(start);
    }
    // Starts may lie below each other; their walks then meet the same nodes.
    sort_unique(exits_);
    sort_unique(ids_);
  }

  [[nodiscard]] std::int64_t steps() const { return steps_; }
  std::vector<std::int32_t> take_exits() { return std::move(exits_); }
  std::vector<std::int32_t> take_ids() { return std::move(ids_); }

 private:
  static void sort_unique(std::vector<std::int32_t>& values) {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
  }

  Reach& reach_at(std::size_t depth) {
    while (reaches_.size() <= depth) {
      reaches_.emplace_back();
      marks_.emplace_back();
    }
    return reaches_[depth];
  }

  void walk_below(std::int32_t start) {
    const std::size_t top = trie_.node(start).depth;
    marks_[0] = graph_.mark();
    const std::int32_t end = trie_.node(start).subtree_end;
    for (std::int32_t i = start + 1; i < end;) {
      ++steps_;
      const TokenTrie::Node& node = trie_.node(i);
      const std::size_t depth = node.depth - top;
      Reach& here = reach_at(depth);  // first: it may move the others
      walker_.step(reaches_[depth - 1], node.byte, places_);
      if (places_.empty()) {
        i = node.subtree_end;
        continue;
      }
      const auto tokens = trie_.tokens_at(i);
      ids_.insert(ids_.end(), tokens.begin(), tokens.end());
      graph_.truncate(marks_[depth - 1]);
      walker_.reach(places_, graph_, here);
      marks_[depth] = graph_.mark();
      if (here.leaves_base) {
        exits_.push_back(i);
      }
      ++i;
    }
  }

  Walker walker_;
  const TokenTrie& trie_;
  FrameGraph graph_;
  std::vector<Reach> reaches_;           // by depth below the start
  std::vector<FrameGraph::Mark> marks_;  // of the graph behind each of them
  std::vector<Place> places_;
  std::vector<std::int32_t> exits_;
  std::vector<std::int32_t> ids_;
  std::int64_t steps_ = 0;
};

}  // namespace

MaskCache::MaskCache(std::shared_ptr<const Automaton> automaton,
                     std::shared_ptr<const TokenTrie> trie)
    : automaton_(std::move(automaton)),
      trie_(std::move(trie)),
      root_(shared_set(std::vector<std::int32_t>{0})) {}

// Counts beyond the longest token cannot change what a token may be.
MaskKey MaskCache::capped(MaskKey key) const {
  if (key.call >= 0) {
    key.need = std::min(key.need, trie_->max_bytes() + 1);
    key.left = key.left > trie_->max_bytes() ? kUnbounded : key.left;
  }
  return key;
}

std::shared_ptr<const NodeSet> MaskCache::shared_set(std::vector<std::int32_t> nodes) {
  const std::lock_guard lock(mutex_);
  if (const auto place = sets_.find(nodes); place != sets_.end()) {
    return place->second;
  }
  if (bytes_ > kMaxBytes) {
    return std::make_shared<const NodeSet>(NodeSet{std::move(nodes), -1});
  }
  bytes_ += 2 * isize(nodes) * checked_cast<std::int64_t>(sizeof(std::int32_t));
  auto set = std::make_shared<const NodeSet>(NodeSet{nodes, isize(sets_)});
  sets_.emplace(std::move(nodes), set);
  return set;
}

std::shared_ptr<const MaskEntry> MaskCache::find(MaskKey key,
                                                 const std::shared_ptr<const NodeSet>& from) {
  key = capped(key);
  const MapKey map_key{key.state, key.call, key.need, key.left, from->id};
  if (from->id >= 0) {
    const std::lock_guard lock(mutex_);
    if (const auto place = entries_.find(map_key); place != entries_.end()) {
      return place->second;
    }
  }
  std::int64_t steps = 0;
  auto entry = compute(key, *from, steps);
  if (from->id >= 0) {
    keep(map_key, entry);
  }
  return entry;
}

std::shared_ptr<const MaskEntry> MaskCache::compute(const MaskKey& key, const NodeSet& from,
                                                    std::int64_t& steps) {
  TrieWalk walk(*automaton_, *trie_);
  walk.run(key, from);
  steps += walk.steps();
  auto entry = std::make_shared<MaskEntry>();
  entry->exits = shared_set(walk.take_exits());
  entry->ids = walk.take_ids();
  const std::int64_t num_words = (trie_->vocab_size() + 31) / 32;
  if (isize(entry->ids) > num_words) {
    entry->bits.resize(usize(num_words));
    for (const std::int32_t id : entry->ids) {
      entry->bits[usize(id / 32)] |= 1U << (static_cast<std::uint32_t>(id) % 32);
    }
    entry->ids = {};
  }
  return entry;
}

void MaskCache::keep(const MapKey& key, std::shared_ptr<const MaskEntry> entry) {
  const std::lock_guard lock(mutex_);
  if (bytes_ <= kMaxBytes) {
    bytes_ += (isize(entry->bits) + isize(entry->ids)) *
                  checked_cast<std::int64_t>(sizeof(std::int32_t)) +
              checked_cast<std::int64_t>(sizeof(MaskEntry));
    entries_.emplace(key, std::move(entry));
  }
}

void MaskCache::warm_up(std::int64_t max_steps) {
  std::int64_t steps = 0;
  for (std::int32_t state = 0; state < automaton_->num_states() && steps < max_steps; ++state) {
    keep({state, -1, 0, 0, root_->id}, compute({.state = state}, *root_, steps));
  }
}

}  // namespace tandem::grammar
