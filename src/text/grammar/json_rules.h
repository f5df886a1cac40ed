// json_rules.h — the rules that JSON texts are made of, each built when it is first asked for.
//
// White space is bounded, or a model could write blanks for ever: nothing, one space, or one line
// break with at most kMaxIndent spaces, and only where JSON allows it inside a value.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/grammar/dfa.h"
#include "text/grammar/number_range.h"
#include "text/json_text.h"

namespace tandem::grammar {

inline constexpr std::int32_t kMaxIndent = 32;
/// Numbers: digits of the integer part when nothing bounds it, of a fraction and of an exponent.
/// Below what overflows a double or a 64-bit integer of any reader.
inline constexpr std::int32_t kMaxIntegerDigits = 18;
inline constexpr std::int32_t kMaxFractionDigits = 18;
inline constexpr std::int32_t kMaxExponentDigits = 2;

/// Inclusive.
struct IntegerRange {
  std::int64_t low = 0;
  std::int64_t high = 0;

  auto operator<=>(const IntegerRange&) const = default;
};
/// What integers are when nothing bounds them: kMaxIntegerDigits digits.
[[nodiscard]] IntegerRange widest_integers();

class JsonRules {
 public:
  using Part = Nfa::Part;

  /// Rule 0 is left for the whole text.
  explicit JsonRules(Budget& budget) : budget_(budget), rules_(1) {}

  [[nodiscard]] Budget& budget() { return budget_; }
  [[nodiscard]] std::int32_t add_rule() {
    rules_.emplace_back();
    return static_cast<std::int32_t>(rules_.size()) - 1;
  }
  void define(std::int32_t rule, Dfa dfa) {
    rules_[static_cast<std::size_t>(rule)] = std::move(dfa);
  }
  [[nodiscard]] const std::vector<Dfa>& rules() const { return rules_; }

  [[nodiscard]] std::int32_t any_value();
  [[nodiscard]] std::int32_t any_object();
  [[nodiscard]] std::int32_t any_array();
  [[nodiscard]] std::int32_t any_string();
  [[nodiscard]] std::int32_t number();
  /// Without an exponent.
  [[nodiscard]] std::int32_t number_between(const std::optional<NumberBound>& low,
                                            const std::optional<NumberBound>& high);
  [[nodiscard]] std::int32_t integer(IntegerRange range);
  /// A string of so many characters.
  [[nodiscard]] std::int32_t string_of_length(std::int32_t min, std::int32_t max);
  /// A string whose characters are a text of `decoded`.
  [[nodiscard]] std::int32_t string_of(const Dfa& decoded);
  /// One character, not escaped.
  [[nodiscard]] std::int32_t plain_character();
  /// A string that is none of `names`, however it is spelled: no \u and \/ escapes, so that each
  /// text has one spelling.
  [[nodiscard]] std::int32_t string_other_than(const std::vector<std::string>& names);

  // Parts of a rule that is being built.
  [[nodiscard]] Part space(Nfa& nfa) { return nfa.call(space_rule(), 0, 1); }
  [[nodiscard]] Part all_of(Nfa& nfa, std::initializer_list<Part> parts);
  /// `space` LITERAL `space`: what stands between the elements of containers.
  [[nodiscard]] Part spaced(Nfa& nfa, std::string_view literal);
  /// A value exactly as given, with free white space inside containers.
  [[nodiscard]] Part value(Nfa& nfa, const JsonNode& node);

 private:
  // The rule with this name, built by `build` unless it exists.
  std::int32_t shared(const std::string& name, const std::function<Part(Nfa&)>& build);
  [[nodiscard]] std::int32_t space_rule();
  [[nodiscard]] std::int32_t character();
  [[nodiscard]] Part short_character(Nfa& nfa);
  [[nodiscard]] Part string_part(Nfa& nfa);
  [[nodiscard]] Part decimal_part(Nfa& nfa);
  [[nodiscard]] Part number_part(Nfa& nfa);
  [[nodiscard]] Part list(Nfa& nfa, std::string_view open, std::string_view close,
                          std::int32_t item);

  Budget& budget_;
  std::vector<Dfa> rules_;
  std::map<std::string, std::int32_t> shared_;
};

}  // namespace tandem::grammar
