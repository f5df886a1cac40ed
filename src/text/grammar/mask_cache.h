// mask_cache.h — which tokens a grammar allows, computed once per place of its automaton.
//
// What may follow depends on the whole stack of calls, but a token mostly ends inside the rule that
// it began in. So the walk through the vocabulary is split by frames: for one place, and for the
// trie nodes at which its walk starts, it gives the tokens that end inside the place's rule, and
// the trie nodes at which the rule can end. There the walk goes on in the caller, as another such
// entry. Entries depend on nothing below their frame, hence they are kept.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <tuple>
#include <vector>

#include "text/grammar/token_trie.h"
#include "text/grammar/walk.h"

namespace tandem::grammar {

/// Trie nodes, ascending. Equal sets are one object with one id, until the cache is full.
struct NodeSet {
  std::vector<std::int32_t> nodes;
  std::int64_t id = -1;  // -1: not shared, entries of it are not kept
};

/// Where a walk through the trie begins: a state at the start of its frame's text, or behind one
/// text of a call (`call` >= 0) with `need` and `left` repetitions to come.
struct MaskKey {
  std::int32_t state = -1;
  std::int32_t call = -1;
  std::int32_t need = 0;
  std::int32_t left = 0;
};

struct MaskEntry {
  std::vector<std::uint32_t> bits;       // as in TokenConstraint::fill_mask(); or empty, and
  std::vector<std::int32_t> ids;         // the few tokens themselves
  std::shared_ptr<const NodeSet> exits;  // where the rule's text can end
};

/// Sets the bits of `ids`; those beyond the mask are ignored.
void set_bits(std::span<std::uint32_t> bits, std::span<const std::int32_t> ids);

/// Shared by all matchers of a grammar over one vocabulary; safe for concurrent use.
class MaskCache {
 public:
  MaskCache(std::shared_ptr<const Automaton> automaton, std::shared_ptr<const TokenTrie> trie);

  [[nodiscard]] const TokenTrie& trie() const { return *trie_; }
  [[nodiscard]] const Automaton& automaton() const { return *automaton_; }
  /// The set of the root alone.
  [[nodiscard]] const std::shared_ptr<const NodeSet>& root() const { return root_; }
  [[nodiscard]] std::shared_ptr<const MaskEntry> find(MaskKey key,
                                                      const std::shared_ptr<const NodeSet>& from);
  /// Computes entries of the states that texts begin tokens in, until about `max_steps` trie nodes
  /// have been walked: off the engine's thread, before the first mask is asked for.
  void warm_up(std::int64_t max_steps);

 private:
  using MapKey = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t, std::int64_t>;

  [[nodiscard]] std::shared_ptr<const MaskEntry> compute(const MaskKey& key, const NodeSet& from,
                                                         std::int64_t& steps);
  void keep(const MapKey& key, std::shared_ptr<const MaskEntry> entry);
  [[nodiscard]] MaskKey capped(MaskKey key) const;
  [[nodiscard]] std::shared_ptr<const NodeSet> shared_set(std::vector<std::int32_t> nodes);

  std::shared_ptr<const Automaton> automaton_;
  std::shared_ptr<const TokenTrie> trie_;

  std::mutex mutex_;  // of what follows
  std::map<MapKey, std::shared_ptr<const MaskEntry>> entries_;
  std::map<std::vector<std::int32_t>, std::shared_ptr<const NodeSet>> sets_;
  std::int64_t bytes_ = 0;  // of entries and sets

  std::shared_ptr<const NodeSet> root_;  // constant; last, because it is one of the sets
};

}  // namespace tandem::grammar
