// number_range.h — the decimal numbers between two bounds, as automata over their digits.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "text/grammar/dfa.h"

namespace tandem::grammar {

/// Digits without leading zeros in the integer part ("0" is one digit) and trailing ones in the
/// fraction.
struct Decimal {
  bool negative = false;
  std::string integer = "0";
  std::string fraction = {};

  [[nodiscard]] bool is_zero() const { return integer == "0" && fraction.empty(); }
};

/// A JSON number, also with an exponent. None when it has more digits than numbers may have here.
[[nodiscard]] std::optional<Decimal> parse_decimal(std::string_view json_number);

/// Below, at or above zero as `a` is less than, equal to or greater than `b`.
[[nodiscard]] int compare(const Decimal& a, const Decimal& b);

struct NumberBound {
  Decimal value;
  bool excluded = false;
};

/// Numbers without an exponent that lie between the bounds, those that there are. `plain`: all
/// numbers that may be written, without their sign and without exponents.
[[nodiscard]] Dfa numbers_between(const std::optional<NumberBound>& low,
                                  const std::optional<NumberBound>& high, const Dfa& plain,
                                  Budget& budget);

}  // namespace tandem::grammar
