// automaton.h — a compiled grammar: rules that are automata over bytes and call each other, laid
// out flat. Every state can still reach its rule's end, so whatever a walk has accepted can be
// completed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "text/grammar/dfa.h"

namespace tandem::grammar {

class Automaton {
 public:
  struct State {
    std::int32_t first_byte = 0;  // index of its edges; those of the next state follow
    std::int32_t first_call = 0;
    bool accepting = false;  // the rule's text may end here
    bool plain = false;      // bytes only: no calls, not accepting
  };

  /// rules[0] is the whole text; every other one matches at least one byte. Parts that no text can
  /// pass through are dropped.
  /// Returns none when no text matches rule 0.
  static std::optional<Automaton> link(const std::vector<Dfa>& rules);

  [[nodiscard]] std::int32_t start_of(std::int32_t rule) const {
    return rule_starts_[static_cast<std::size_t>(rule)];
  }
  [[nodiscard]] bool is_accepting(std::int32_t state) const { return at(state).accepting; }
  [[nodiscard]] bool is_plain(std::int32_t state) const { return at(state).plain; }
  [[nodiscard]] std::span<const ByteEdge> bytes_of(std::int32_t state) const {
    return {byte_edges_.data() + at(state).first_byte,
            byte_edges_.data() + at(state + 1).first_byte};
  }
  /// The state behind a byte; -1: none.
  [[nodiscard]] std::int32_t next(std::int32_t state, std::uint8_t byte) const {
    for (const ByteEdge& edge : bytes_of(state)) {
      if (byte <= edge.high) {
        return byte >= edge.low ? edge.target : -1;
      }
    }
    return -1;
  }
  [[nodiscard]] std::int32_t first_call_of(std::int32_t state) const {
    return at(state).first_call;
  }
  [[nodiscard]] const CallEdge& call(std::int32_t edge) const {
    return call_edges_[static_cast<std::size_t>(edge)];
  }
  [[nodiscard]] std::int32_t num_calls() const {
    return static_cast<std::int32_t>(call_edges_.size());
  }
  /// States 0..num_states()-1.
  [[nodiscard]] std::int32_t num_states() const {
    return static_cast<std::int32_t>(states_.size()) - 1;
  }

 private:
  [[nodiscard]] const State& at(std::int32_t state) const {
    return states_[static_cast<std::size_t>(state)];
  }

  std::vector<State> states_;  // one more than there are, for the ends of the last one's edges
  std::vector<ByteEdge> byte_edges_;
  std::vector<CallEdge> call_edges_;
  std::vector<std::int32_t> rule_starts_;  // -1: a rule without a text
};

}  // namespace tandem::grammar
