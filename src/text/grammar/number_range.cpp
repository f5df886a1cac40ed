#include "text/grammar/number_range.h"

#include <algorithm>
#include <charconv>
#include <tuple>
#include <utility>

#include "core/checked_cast.h"
#include "text/grammar/json_rules.h"

namespace tandem::grammar {
namespace {

using Part = Nfa::Part;

std::uint8_t byte(char c) {
  return static_cast<std::uint8_t>(c);
}

// Magnitudes on one side of a bound. Both kinds are built for any number of digits; how many there
// may be is the other automaton's business.
class Side {
 public:
  Side(const NumberBound& bound, Budget& budget)
      : value_(bound.value), excluded_(bound.excluded), budget_(budget), nfa_(budget) {}

  Dfa at_least() {
    Part more = longer_integers();
    more = nfa_.either(more, integers('>'));
    Part whole = nfa_.sequence(more, any_fraction());
    whole = nfa_.either(whole, nfa_.sequence(nfa_.literal(value_.integer), fraction_at_least()));
    return finished(whole);
  }

  Dfa at_most() {
    Part less = shorter_integers();
    less = nfa_.either(less, integers('<'));
    Part whole = nfa_.sequence(less, any_fraction());
    whole = nfa_.either(whole, nfa_.sequence(nfa_.literal(value_.integer), fraction_at_most()));
    return finished(whole);
  }

 private:
  Dfa finished(Part whole) { return budget_.exhausted() ? Dfa{} : nfa_.determinize(whole); }
  Part digit() { return nfa_.bytes('0', '9'); }
  Part digits() { return nfa_.star(digit()); }
  Part digits(std::size_t count) {
    Part whole = nfa_.empty();
    for (std::size_t i = 0; i < count; ++i) {
      whole = nfa_.sequence(whole, digit());
    }
    return whole;
  }
  Part any_fraction() {
    return nfa_.optional(nfa_.sequence(nfa_.literal("."), nfa_.sequence(digit(), digits())));
  }
  // Digits that are not all zero.
  Part some_nonzero() {
    const Part zeros = nfa_.star(nfa_.literal("0"));
    return nfa_.sequence(zeros, nfa_.sequence(nfa_.bytes('1', '9'), digits()));
  }

  Part longer_integers() {
    const Part first = nfa_.sequence(nfa_.bytes('1', '9'), digits(value_.integer.size()));
    return nfa_.sequence(first, digits());
  }
  // Leading zeros are no numbers; the other automaton refuses them.
  Part shorter_integers() {
    Part whole = nfa_.never();
    for (std::size_t length = 1; length < value_.integer.size(); ++length) {
      whole = nfa_.either(whole, digits(length));
    }
    return whole;
  }
  // Integers of the bound's length that are greater, or less.
  Part integers(char order) {
    Part whole = nfa_.never();
    for (std::size_t i = 0; i < value_.integer.size(); ++i) {
      Part same = nfa_.literal(value_.integer.substr(0, i));
      same = nfa_.sequence(same, beyond(value_.integer[i], order));
      whole = nfa_.either(whole, nfa_.sequence(same, digits(value_.integer.size() - i - 1)));
    }
    return whole;
  }
  // One digit beyond another.
  Part beyond(char c, char order) {
    if (c == (order == '>' ? '9' : '0')) {
      return nfa_.never();
    }
    return order == '>' ? nfa_.bytes(byte(static_cast<char>(c + 1)), '9')
                        : nfa_.bytes('0', byte(static_cast<char>(c - 1)));
  }

  void add_alternative(Part whole, Part part) {
    nfa_.add_empty_edge(whole.start, part.start);
    nfa_.add_empty_edge(part.end, whole.end);
  }

  Part fraction_at_least() {
    const std::string& fraction = value_.fraction;
    const Part whole = nfa_.never();
    const auto add = [&](Part part) { add_alternative(whole, part); };
    for (std::size_t i = 0; i < fraction.size(); ++i) {
      const Part same = nfa_.literal(fmt::format(".{}", fraction.substr(0, i)));
      add(nfa_.sequence(same, nfa_.sequence(beyond(fraction[i], '>'), digits())));
    }
    if (fraction.empty()) {
      add(excluded_ ? nfa_.sequence(nfa_.literal("."), some_nonzero()) : any_fraction());
    } else {
      add(nfa_.sequence(nfa_.literal(fmt::format(".{}", fraction)),
                        excluded_ ? some_nonzero() : digits()));
    }
    return whole;
  }

  Part fraction_at_most() {
    const std::string& fraction = value_.fraction;
    const Part whole = nfa_.never();
    const auto add = [&](Part part) { add_alternative(whole, part); };
    for (std::size_t i = 0; i < fraction.size(); ++i) {
      const Part same = nfa_.literal(fmt::format(".{}", fraction.substr(0, i)));
      add(nfa_.sequence(same, nfa_.sequence(beyond(fraction[i], '<'), digits())));
      // Ending before the bound's last digit, which is none of zero, is ending below it.
      add(nfa_.literal(i == 0 ? std::string() : fmt::format(".{}", fraction.substr(0, i))));
    }
    if (!excluded_) {
      const Part zeros = nfa_.star(nfa_.literal("0"));
      const Part equal = fraction.empty()
                             ? nfa_.sequence(nfa_.literal(".0"), zeros)
                             : nfa_.sequence(nfa_.literal(fmt::format(".{}", fraction)), zeros);
      add(fraction.empty() ? nfa_.optional(equal) : equal);
    }
    return whole;
  }

  const Decimal& value_;
  bool excluded_;
  Budget& budget_;
  Nfa nfa_;
};

}  // namespace

std::optional<Decimal> parse_decimal(std::string_view json_number) {
  Decimal result;
  result.negative = json_number.starts_with("-");
  json_number.remove_prefix(result.negative ? 1 : 0);
  std::int64_t exponent = 0;
  if (const std::size_t mark = json_number.find_first_of("eE"); mark != json_number.npos) {
    std::string_view text = json_number.substr(mark + 1);
    text.remove_prefix(text.starts_with("+") ? 1 : 0);
    if (std::from_chars(text.data(), text.data() + text.size(), exponent).ec != std::errc() ||
        exponent > 1000 || exponent < -1000) {
      return std::nullopt;
    }
    json_number = json_number.substr(0, mark);
  }
  const std::size_t point = std::min(json_number.find('.'), json_number.size());
  std::string digits(json_number.substr(0, point));
  exponent += isize(digits);  // where the point stands
  if (point < json_number.size()) {
    digits += json_number.substr(point + 1);
  }
  if (exponent < 0) {
    digits.insert(0, usize(-exponent), '0');
    exponent = 0;
  }
  if (isize(digits) < exponent) {
    digits.append(usize(exponent) - digits.size(), '0');
  }
  result.integer = digits.substr(0, usize(exponent));
  result.integer.erase(0, std::min(result.integer.find_first_not_of('0'), result.integer.size()));
  result.fraction = digits.substr(usize(exponent));
  result.fraction.erase(result.fraction.find_last_not_of('0') + 1);
  if (isize(result.integer) > kMaxIntegerDigits || isize(result.fraction) > kMaxFractionDigits) {
    return std::nullopt;
  }
  if (result.integer.empty()) {
    result.integer.push_back('0');
  }
  result.negative = result.negative && !result.is_zero();
  return result;
}

int compare(const Decimal& a, const Decimal& b) {
  if (a.negative != b.negative) {
    return a.negative ? -1 : 1;
  }
  const auto magnitude = [](const Decimal& value) {
    return std::tuple(value.integer.size(), std::string_view(value.integer),
                      std::string_view(value.fraction));
  };
  const auto order = magnitude(a) <=> magnitude(b);
  const int sign = order < 0 ? -1 : order > 0 ? 1 : 0;
  return a.negative ? -sign : sign;
}

Dfa numbers_between(const std::optional<NumberBound>& low, const std::optional<NumberBound>& high,
                    const Dfa& plain, Budget& budget) {
  // Magnitudes from `from` to `to`, those that there are.
  const auto magnitudes = [&](const std::optional<NumberBound>& from,
                              const std::optional<NumberBound>& to) {
    Dfa result = plain;
    if (from) {
      result = intersect(result, Side(*from, budget).at_least(), budget);
    }
    return to ? intersect(result, Side(*to, budget).at_most(), budget) : result;
  };
  Nfa nfa(budget);
  const auto copy = [&](const Dfa& dfa) {
    return nfa.copy_of(dfa, [&](std::int32_t from, ByteEdge edge, std::int32_t to) {
      nfa.add_edge(from, {edge.low, edge.high, to});
    });
  };
  // Below zero the bounds change sides; a bound above zero says nothing there, nor does one below
  // zero about the rest.
  const bool low_is_below = !low || low->value.negative;
  const bool high_is_above = high && !high->value.negative && !high->value.is_zero();
  Part whole = nfa.never();
  if (!high || !high->value.negative) {
    whole = nfa.either(whole, copy(magnitudes(low_is_below ? std::nullopt : low, high)));
  }
  if (low_is_below) {
    const Part below = copy(magnitudes(high_is_above ? std::nullopt : high, low));
    whole = nfa.either(whole, nfa.sequence(nfa.literal("-"), below));
  }
  return budget.exhausted() ? Dfa{} : nfa.determinize(whole);
}

}  // namespace tandem::grammar
