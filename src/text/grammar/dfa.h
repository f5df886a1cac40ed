// dfa.h — finite automata over bytes that may also call rules, and what can be done with them.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "text/grammar/budget.h"
#include "text/grammar/char_set.h"

namespace tandem::grammar {

/// "No limit" of a repetition.
inline constexpr std::int32_t kUnbounded = std::numeric_limits<std::int32_t>::max();

struct ByteEdge {
  std::uint8_t low = 0;
  std::uint8_t high = 0;  // inclusive
  std::int32_t target = 0;
};

/// Between `min` and `max` texts of a rule in a row, then on to `target`.
struct CallEdge {
  std::int32_t rule = 0;
  std::int32_t min = 1;
  std::int32_t max = 1;
  std::int32_t target = 0;
};

/// Deterministic in its bytes and in which rule with which counts is called; a byte edge and a
/// call may still begin with the same byte. State 0 is the start. No states: no text.
struct Dfa {
  struct State {
    std::vector<ByteEdge> bytes;  // disjoint, ascending
    std::vector<CallEdge> calls;
    bool accepting = false;
  };
  std::vector<State> states;
};

/// Builds automata of parts; every part is used once. No edge leads into a part's start from inside
/// it, none out of its end, so parts can be joined there. When the budget runs out parts lose their
/// meaning, so check it before using the result.
class Nfa {
 public:
  struct Part {
    std::int32_t start = 0;
    std::int32_t end = 0;
  };

  explicit Nfa(Budget& budget) : budget_(&budget) {}

  Part empty();
  Part never();  // no text
  Part bytes(std::uint8_t low, std::uint8_t high);
  Part literal(std::string_view text);
  Part chars(const CharSet& set);
  Part call(std::int32_t rule, std::int32_t min = 1, std::int32_t max = 1);
  /// The texts of an automaton without calls, each byte edge written by `add_edge`.
  template <typename AddEdge>
  Part copy_of(const Dfa& dfa, AddEdge add_edge) {
    const Part whole = never();
    std::vector<std::int32_t> states;
    for (std::size_t i = 0; i < dfa.states.size(); ++i) {
      states.push_back(add_state());
    }
    for (std::size_t i = 0; i < dfa.states.size(); ++i) {
      for (const ByteEdge& edge : dfa.states[i].bytes) {
        add_edge(states[i], edge, states[static_cast<std::size_t>(edge.target)]);
      }
      if (dfa.states[i].accepting) {
        add_empty_edge(states[i], whole.end);
      }
    }
    if (!states.empty()) {
      add_empty_edge(whole.start, states[0]);
    }
    return whole;
  }

  Part sequence(Part first, Part second);
  Part either(Part first, Part second);
  Part optional(Part part);
  Part star(Part part);

  // For what is easier said state by state.
  std::int32_t add_state();
  void add_edge(std::int32_t from, ByteEdge edge);
  void add_empty_edge(std::int32_t from, std::int32_t to);

  /// Subset construction.
  [[nodiscard]] Dfa determinize(Part whole) const;

 private:
  friend class SubsetBuilder;
  struct State {
    std::vector<std::int32_t> empties;
    std::vector<ByteEdge> bytes;
    std::vector<CallEdge> calls;
  };

  Budget* budget_;
  std::vector<State> states_;
};

/// Texts of both. Neither may call rules.
[[nodiscard]] Dfa intersect(const Dfa& a, const Dfa& b, Budget& budget);

/// Texts of `a` that are none of `b`'s. Neither may call rules.
[[nodiscard]] Dfa subtract(const Dfa& a, const Dfa& b, Budget& budget);

/// All texts of `min` to `max` characters of UTF-8; with kUnbounded any number from `min` on.
[[nodiscard]] Dfa characters_between(std::int32_t min, std::int32_t max, Budget& budget);

}  // namespace tandem::grammar
