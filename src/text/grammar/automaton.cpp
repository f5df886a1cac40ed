#include "text/grammar/automaton.h"

#include <utility>

#include "core/checked_cast.h"

namespace tandem::grammar {
namespace {

using Flags = std::vector<char>;  // by state of one rule

// Which rules have a text, and from which of their states the end can be reached.
class Usefulness {
 public:
  explicit Usefulness(const std::vector<Dfa>& rules) : rules_(rules), has_text_(rules.size(), 0) {
    std::vector<std::vector<std::size_t>> callers(rules.size());
    std::vector<std::size_t> waiting;
    for (std::size_t rule = 0; rule < rules.size(); ++rule) {
      waiting.push_back(rule);
      for (const Dfa::State& state : rules[rule].states) {
        for (const CallEdge& edge : state.calls) {
          callers[usize(edge.rule)].push_back(rule);
        }
      }
    }
    while (!waiting.empty()) {
      const std::size_t rule = waiting.back();
      waiting.pop_back();
      if (has_text_[rule] != 0 || rules[rule].states.empty() || live_states(rule)[0] == 0) {
        continue;
      }
      has_text_[rule] = 1;
      waiting.insert(waiting.end(), callers[rule].begin(), callers[rule].end());
    }
  }

  [[nodiscard]] bool has_text(std::size_t rule) const { return has_text_[rule] != 0; }
  [[nodiscard]] bool can_pass(const CallEdge& edge) const {
    return edge.min == 0 || has_text(usize(edge.rule));
  }

  // States from which the rule's end can be reached through what is known to have a text.
  [[nodiscard]] Flags live_states(std::size_t rule) const {
    const std::vector<Dfa::State>& states = rules_[rule].states;
    std::vector<std::vector<std::int32_t>> sources(states.size());
    Flags live(states.size(), 0);
    std::vector<std::int32_t> waiting;
    for (std::size_t i = 0; i < states.size(); ++i) {
      const auto from = checked_cast<std::int32_t>(i);
      for (const ByteEdge& edge : states[i].bytes) {
        sources[usize(edge.target)].push_back(from);
      }
      for (const CallEdge& edge : states[i].calls) {
        if (can_pass(edge)) {
          sources[usize(edge.target)].push_back(from);
        }
      }
      if (states[i].accepting) {
        live[i] = 1;
        waiting.push_back(from);
      }
    }
    while (!waiting.empty()) {
      const std::int32_t state = waiting.back();
      waiting.pop_back();
      for (const std::int32_t from : sources[usize(state)]) {
        if (std::exchange(live[usize(from)], char{1}) == 0) {
          waiting.push_back(from);
        }
      }
    }
    return live;
  }

 private:
  const std::vector<Dfa>& rules_;
  Flags has_text_;
};

// A rule without a byte could be called for ever at one place.
bool matches_empty_text(const Dfa& rule) {
  std::vector<std::int32_t> waiting{0};
  Flags seen(rule.states.size(), 0);
  while (!waiting.empty()) {
    const std::int32_t state = waiting.back();
    waiting.pop_back();
    if (std::exchange(seen[usize(state)], char{1}) != 0) {
      continue;
    }
    if (rule.states[usize(state)].accepting) {
      return true;
    }
    for (const CallEdge& edge : rule.states[usize(state)].calls) {
      if (edge.min == 0) {
        waiting.push_back(edge.target);
      }
    }
  }
  return false;
}

}  // namespace

std::optional<Automaton> Automaton::link(const std::vector<Dfa>& rules) {
  const Usefulness useful(rules);
  if (!useful.has_text(0)) {
    return std::nullopt;
  }
  Automaton result;
  std::vector<std::vector<std::int32_t>> ids(rules.size());  // -1: dropped
  std::int32_t next_id = 0;
  for (std::size_t rule = 0; rule < rules.size(); ++rule) {
    result.rule_starts_.push_back(useful.has_text(rule) ? next_id : -1);
    if (!useful.has_text(rule)) {
      continue;
    }
    TDM_CHECK(rule == 0 || !matches_empty_text(rules[rule]), rule);
    for (const char live : useful.live_states(rule)) {
      ids[rule].push_back(live != 0 ? next_id++ : -1);
    }
  }
  for (std::size_t rule = 0; rule < rules.size(); ++rule) {
    for (std::size_t i = 0; i < ids[rule].size(); ++i) {
      if (ids[rule][i] < 0) {
        continue;
      }
      const Dfa::State& state = rules[rule].states[i];
      result.states_.push_back({checked_cast<std::int32_t>(isize(result.byte_edges_)),
                                checked_cast<std::int32_t>(isize(result.call_edges_)),
                                state.accepting});
      for (ByteEdge edge : state.bytes) {
        edge.target = ids[rule][usize(edge.target)];
        if (edge.target >= 0) {
          result.byte_edges_.push_back(edge);
        }
      }
      for (CallEdge edge : state.calls) {
        edge.target = ids[rule][usize(edge.target)];
        if (edge.target >= 0 && useful.can_pass(edge)) {
          edge.max = useful.has_text(usize(edge.rule)) ? edge.max : 0;
          result.call_edges_.push_back(edge);
        }
      }
      State& made = result.states_.back();
      made.plain = !made.accepting && isize(result.call_edges_) == made.first_call;
    }
  }
  result.states_.push_back({checked_cast<std::int32_t>(isize(result.byte_edges_)),
                            checked_cast<std::int32_t>(isize(result.call_edges_)), false});
  return result;
}

}  // namespace tandem::grammar
