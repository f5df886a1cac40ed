#include "text/grammar/mask_cache.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "core/checked_cast.h"

namespace tandem::grammar {
namespace {

std::vector<std::int32_t> ids_of(std::span<const std::uint32_t> bits) {
  std::vector<std::int32_t> ids;
  for (std::size_t i = 0; i < bits.size(); ++i) {
    for (std::uint32_t word = bits[i]; word != 0; word &= word - 1) {
      ids.push_back(checked_cast<std::int32_t>(32 * isize(bits.first(i))) + std::countr_zero(word));
    }
  }
  return ids;
}

constexpr std::int64_t kMaxBytes = std::int64_t{64} << 20;  // of one cache; 2,000 masks of K3

// One walk over the trie for one key, from each of its start nodes.
class TrieWalk {
 public:
  TrieWalk(const Automaton& automaton, const TokenTrie& trie)
      : automaton_(automaton),
        walker_(automaton),
        trie_(trie),
        bits_(usize((trie.vocab_size() + 31) / 32)) {}

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
    if (from.nodes.size() > 1) {
      std::sort(exits_.begin(), exits_.end());
      exits_.erase(std::unique(exits_.begin(), exits_.end()), exits_.end());
    }
  }

  [[nodiscard]] std::int64_t steps() const { return steps_; }
  std::vector<std::int32_t> take_exits() { return std::move(exits_); }
  std::vector<std::uint32_t> take_bits() { return std::move(bits_); }

 private:
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
      const Reach& before = reaches_[depth - 1];
      walker_.step(before, node.byte, places_);
      if (places_.empty()) {
        i = node.subtree_end;
        continue;
      }
      set_bits(bits_, trie_.tokens_at(i));
      graph_.truncate(marks_[depth - 1]);
      if (places_.size() == 1 && automaton_.is_plain(places_[0].state)) {
        here.clear();
        here.places.push_back(places_[0]);
      } else {
        walker_.reach(places_, graph_, here);
      }
      marks_[depth] = graph_.mark();
      if (here.leaves_base) {
        exits_.push_back(i);
      }
      ++i;
    }
  }

  const Automaton& automaton_;
  Walker walker_;
  const TokenTrie& trie_;
  FrameGraph graph_;
  std::vector<Reach> reaches_;           // by depth below the start
  std::vector<FrameGraph::Mark> marks_;  // of the graph behind each of them
  std::vector<Place> places_;
  std::vector<std::int32_t> exits_;
  std::vector<std::uint32_t> bits_;
  std::int64_t steps_ = 0;
};

}  // namespace

void set_bits(std::span<std::uint32_t> bits, std::span<const std::int32_t> ids) {
  for (const std::int32_t id : ids) {
    const auto word = static_cast<std::size_t>(id / 32);
    if (id >= 0 && word < bits.size()) {
      bits[word] |= 1U << (static_cast<std::uint32_t>(id) % 32);
    }
  }
}

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
  entry->bits = walk.take_bits();
  std::int64_t count = 0;
  for (const std::uint32_t word : entry->bits) {
    count += std::popcount(word);
  }
  if (count <= isize(entry->bits)) {
    entry->ids = ids_of(entry->bits);
    entry->bits = {};
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
  for (std::int32_t edge = 0; edge < automaton_->num_calls() && steps < max_steps; ++edge) {
    if (automaton_->call(edge).max > trie_->max_bytes()) {  // the middle of a long repetition
      keep({-1, edge, 0, kUnbounded, root_->id},
           compute({.call = edge, .left = kUnbounded}, *root_, steps));
    }
  }
  for (std::int32_t state = 0; state < automaton_->num_states() && steps < max_steps; ++state) {
    keep({state, -1, 0, 0, root_->id}, compute({.state = state}, *root_, steps));
  }
}

}  // namespace tandem::grammar
