#include "text/grammar/dfa.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>

#include "core/checked_cast.h"

namespace tandem::grammar {

std::int32_t Nfa::add_state() {
  // Out of budget every state is the first one; nobody reads the result.
  if (!budget_->take_state() && !states_.empty()) {
    return 0;
  }
  states_.emplace_back();
  return checked_cast<std::int32_t>(isize(states_) - 1);
}

void Nfa::add_edge(std::int32_t from, ByteEdge edge) {
  states_[usize(from)].bytes.push_back(edge);
}

void Nfa::add_empty_edge(std::int32_t from, std::int32_t to) {
  states_[usize(from)].empties.push_back(to);
}

Nfa::Part Nfa::never() {
  const std::int32_t start = add_state();
  return {start, add_state()};
}

Nfa::Part Nfa::empty() {
  const Part part = never();
  add_empty_edge(part.start, part.end);
  return part;
}

Nfa::Part Nfa::bytes(std::uint8_t low, std::uint8_t high) {
  const Part part = never();
  add_edge(part.start, {low, high, part.end});
  return part;
}

Nfa::Part Nfa::literal(std::string_view text) {
  if (text.empty()) {
    return empty();
  }
  const std::int32_t start = add_state();
  std::int32_t at = start;
  for (const char c : text) {
    const std::int32_t next = add_state();
    const auto byte = static_cast<std::uint8_t>(c);
    add_edge(at, {byte, byte, next});
    at = next;
  }
  return {start, at};
}

Nfa::Part Nfa::chars(const CharSet& set) {
  const Part part = never();
  for (const ByteSequence& sequence : utf8_sequences(set)) {
    std::int32_t at = part.start;
    for (std::size_t i = 0; i < sequence.size(); ++i) {
      const std::int32_t next = i + 1 == sequence.size() ? part.end : add_state();
      add_edge(at, {sequence[i].low, sequence[i].high, next});
      at = next;
    }
  }
  return part;
}

Nfa::Part Nfa::call(std::int32_t rule, std::int32_t min, std::int32_t max) {
  TDM_CHECK(min >= 0 && max >= min, min, max);
  if (max == 0) {
    return empty();
  }
  const Part part = never();
  states_[usize(part.start)].calls.push_back({rule, min, max, part.end});
  return part;
}

Nfa::Part Nfa::sequence(Part first, Part second) {
  add_empty_edge(first.end, second.start);
  return {first.start, second.end};
}

Nfa::Part Nfa::either(Part first, Part second) {
  add_empty_edge(first.start, second.start);
  add_empty_edge(second.end, first.end);
  return first;
}

Nfa::Part Nfa::optional(Part part) {
  const Part whole = empty();
  add_empty_edge(whole.start, part.start);
  add_empty_edge(part.end, whole.end);
  return whole;
}

Nfa::Part Nfa::star(Part part) {
  const Part whole = optional(part);
  add_empty_edge(part.end, part.start);
  return whole;
}

// The subset construction: a state of the result is the set of states that the bytes and calls so
// far may have led to.
class SubsetBuilder {
 public:
  SubsetBuilder(const Nfa& nfa, std::int32_t end)
      : nfa_(nfa), end_(end), seen_(nfa.states_.size(), 0) {}

  Dfa build(std::int32_t start) {
    state_of({start});
    for (std::size_t i = 0; i < sets_.size() && !nfa_.budget_->exhausted(); ++i) {
      const std::vector<std::int32_t> set = *sets_[i];
      add_byte_edges(i, set);
      add_call_edges(i, set);
    }
    return std::move(dfa_);
  }

 private:
  using Set = std::vector<std::int32_t>;

  // The result's state for everything reachable from `set` without a byte or a call.
  std::int32_t state_of(Set set) {
    ++stamp_;
    std::size_t kept = 0;
    for (const std::int32_t state : set) {
      if (std::exchange(seen_[usize(state)], stamp_) != stamp_) {
        set[kept++] = state;
      }
    }
    set.resize(kept);
    for (std::size_t i = 0; i < set.size(); ++i) {
      for (const std::int32_t next : nfa_.states_[usize(set[i])].empties) {
        if (std::exchange(seen_[usize(next)], stamp_) != stamp_) {
          set.push_back(next);
        }
      }
    }
    static_cast<void>(nfa_.budget_->take_work(isize(set)));
    std::erase_if(set, [&](std::int32_t state) {
      const Nfa::State& from = nfa_.states_[usize(state)];
      return from.bytes.empty() && from.calls.empty() && state != end_;
    });
    std::sort(set.begin(), set.end());
    const auto [place, is_new] =
        ids_.emplace(std::move(set), checked_cast<std::int32_t>(isize(dfa_.states)));
    if (is_new && nfa_.budget_->take_state()) {
      sets_.push_back(&place->first);
      dfa_.states.emplace_back();
      dfa_.states.back().accepting =
          std::binary_search(place->first.begin(), place->first.end(), end_);
    }
    return place->second;
  }

  void add_byte_edges(std::size_t from, const Set& set) {
    std::array<bool, 257> begins{};  // bytes at which the set of matching edges changes
    std::vector<ByteEdge> edges;
    for (const std::int32_t state : set) {
      for (const ByteEdge& edge : nfa_.states_[usize(state)].bytes) {
        edges.push_back(edge);
        begins[edge.low] = true;
        begins[edge.high + 1U] = true;
      }
    }
    begins[256] = !edges.empty();
    std::vector<ByteEdge> result;
    for (std::size_t low = 0; low < 256;) {
      std::size_t end = low + 1;
      while (end < 256 && !begins[end]) {
        ++end;
      }
      Set targets;
      for (const ByteEdge& edge : edges) {
        if (edge.low <= low && low <= edge.high) {
          targets.push_back(edge.target);
        }
      }
      if (!targets.empty() && nfa_.budget_->take_work(1)) {
        const std::int32_t target = state_of(std::move(targets));
        if (!result.empty() && result.back().target == target && result.back().high + 1U == low) {
          result.back().high = checked_cast<std::uint8_t>(end - 1);
        } else {
          result.push_back(
              {checked_cast<std::uint8_t>(low), checked_cast<std::uint8_t>(end - 1), target});
        }
      }
      low = end;
    }
    dfa_.states[from].bytes = std::move(result);
  }

  void add_call_edges(std::size_t from, const Set& set) {
    std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, Set> calls;
    for (const std::int32_t state : set) {
      for (const CallEdge& edge : nfa_.states_[usize(state)].calls) {
        calls[{edge.rule, edge.min, edge.max}].push_back(edge.target);
      }
    }
    for (auto& [call, targets] : calls) {
      const auto [rule, min, max] = call;
      const std::int32_t target = state_of(std::move(targets));
      dfa_.states[from].calls.push_back({rule, min, max, target});
    }
  }

  const Nfa& nfa_;
  std::int32_t end_;
  std::vector<std::int32_t> seen_;  // stamp of the closure that met the state last
  std::int32_t stamp_ = 0;
  std::map<Set, std::int32_t> ids_;
  std::vector<const Set*> sets_;  // by state; keys of ids_
  Dfa dfa_;
};

Dfa Nfa::determinize(Part whole) const {
  return SubsetBuilder(*this, whole.end).build(whole.start);
}

namespace {

enum class Product { kBoth, kFirstOnly };

// Runs two automata side by side. State -1 of the second: it has left all of its texts.
class ProductBuilder {
 public:
  ProductBuilder(const Dfa& a, const Dfa& b, Product kind, Budget& budget)
      : a_(a), b_(b), kind_(kind), budget_(budget) {}

  Dfa build() {
    if (!a_.states.empty()) {
      state_of({0, b_.states.empty() ? -1 : 0});
    }
    for (std::size_t i = 0; i < pairs_.size() && budget_.take_state(); ++i) {
      const auto [first, second] = pairs_[i];
      for (const ByteEdge& edge : a_.states[usize(first)].bytes) {
        add_edges(i, edge, second);
      }
    }
    return std::move(result_);
  }

 private:
  using Pair = std::pair<std::int32_t, std::int32_t>;

  std::int32_t state_of(Pair pair) {
    const auto [place, is_new] = ids_.emplace(pair, checked_cast<std::int32_t>(isize(pairs_)));
    if (is_new) {
      const bool in_second = pair.second >= 0 && b_.states[usize(pair.second)].accepting;
      pairs_.push_back(pair);
      result_.states.emplace_back();
      result_.states.back().accepting =
          a_.states[usize(pair.first)].accepting && in_second == (kind_ == Product::kBoth);
    }
    return place->second;
  }

  void add_edges(std::size_t from, const ByteEdge& edge, std::int32_t second) {
    const auto add = [&](std::uint32_t low, std::uint32_t high, std::int32_t target) {
      if (low <= high && (target >= 0 || kind_ == Product::kFirstOnly) && budget_.take_work(1)) {
        const std::int32_t to = state_of({edge.target, target});
        result_.states[from].bytes.push_back(
            {checked_cast<std::uint8_t>(low), checked_cast<std::uint8_t>(high), to});
      }
    };
    std::uint32_t next = edge.low;
    if (second >= 0) {
      for (const ByteEdge& other : b_.states[usize(second)].bytes) {
        const std::uint32_t low = std::max(edge.low, other.low);
        const std::uint32_t high = std::min(edge.high, other.high);
        if (low <= high) {
          if (low > next) {
            add(next, low - 1, -1);
          }
          add(low, high, other.target);
          next = high + 1;
        }
      }
    }
    add(next, edge.high, -1);
  }

  const Dfa& a_;
  const Dfa& b_;
  Product kind_;
  Budget& budget_;
  std::map<Pair, std::int32_t> ids_;
  std::vector<Pair> pairs_;
  Dfa result_;
};

}  // namespace

Dfa intersect(const Dfa& a, const Dfa& b, Budget& budget) {
  return ProductBuilder(a, b, Product::kBoth, budget).build();
}

Dfa subtract(const Dfa& a, const Dfa& b, Budget& budget) {
  return ProductBuilder(a, b, Product::kFirstOnly, budget).build();
}

Dfa characters_between(std::int32_t min, std::int32_t max, Budget& budget) {
  Nfa nfa(budget);
  Nfa::Part whole = nfa.empty();
  const std::int32_t unrolled = max == kUnbounded ? min : max;
  for (std::int32_t i = 0; i < unrolled && !budget.exhausted(); ++i) {
    const Nfa::Part next = nfa.chars(CharSet::all());
    if (i >= min) {
      nfa.add_empty_edge(next.start, next.end);
    }
    whole = nfa.sequence(whole, next);
  }
  if (max == kUnbounded) {
    whole = nfa.sequence(whole, nfa.star(nfa.chars(CharSet::all())));
  }
  return budget.exhausted() ? Dfa{} : nfa.determinize(whole);
}

}  // namespace tandem::grammar
