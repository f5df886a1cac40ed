#include "text/grammar/json_rules.h"

#include <algorithm>
#include <array>

#include "core/checked_cast.h"

namespace tandem::grammar {
namespace {

using Part = Nfa::Part;

// Characters that stand in a JSON string as they are.
CharSet plain_set() {
  return {{0x20, '"' - 1}, {'"' + 1, '\\' - 1}, {'\\' + 1, kMaxCodePoint}};
}

Part hex(Nfa& nfa, std::string_view first, std::string_view last) {
  const Part part = nfa.never();
  for (std::size_t i = 0; i < first.size(); ++i) {
    const auto low = static_cast<std::uint8_t>(first[i]);
    const auto high = static_cast<std::uint8_t>(last[i]);
    nfa.add_edge(part.start, {low, high, part.end});
  }
  return part;
}
Part hex_digit(Nfa& nfa) {
  return hex(nfa, "0aA", "9fF");
}

Part chain(Nfa& nfa, std::initializer_list<Part> parts) {
  Part whole = nfa.empty();
  for (const Part& part : parts) {
    whole = nfa.sequence(whole, part);
  }
  return whole;
}

// \uXXXX of one character: two of them for those beyond U+FFFF, never a lone surrogate.
Part unicode_escape(Nfa& nfa) {
  const auto escape = [&](Part first, Part second) {
    return chain(nfa, {nfa.literal("\\u"), first, second, hex_digit(nfa), hex_digit(nfa)});
  };
  Part whole = escape(hex(nfa, "0aAeE", "9cCfF"), hex_digit(nfa));
  whole = nfa.either(whole, escape(hex(nfa, "dD", "dD"), hex(nfa, "0", "7")));
  const Part high = escape(hex(nfa, "dD", "dD"), hex(nfa, "8aA", "9bB"));
  const Part low = escape(hex(nfa, "dD", "dD"), hex(nfa, "cC", "fF"));
  return nfa.either(whole, nfa.sequence(high, low));
}

Part one_of(Nfa& nfa, std::string_view bytes) {
  const Part part = nfa.never();
  for (const char c : bytes) {
    const auto byte = static_cast<std::uint8_t>(c);
    nfa.add_edge(part.start, {byte, byte, part.end});
  }
  return part;
}

Part digits(Nfa& nfa, std::int32_t min, std::int32_t max) {
  Part whole = nfa.empty();
  for (std::int32_t i = 0; i < max; ++i) {
    const Part digit = nfa.bytes('0', '9');
    whole = nfa.sequence(whole, i < min ? digit : nfa.optional(digit));
  }
  return whole;
}

// Digit strings of one length between two bounds.
Part digits_between(Nfa& nfa, std::string_view low, std::string_view high) {
  const bool is_all =
      low.find_first_not_of('0') == low.npos && high.find_first_not_of('9') == high.npos;
  if (is_all) {
    const auto length = checked_cast<std::int32_t>(low.size());
    return digits(nfa, length, length);
  }
  const auto byte = [](char c) { return static_cast<std::uint8_t>(c); };
  const std::string_view low_rest = low.substr(1);
  const std::string_view high_rest = high.substr(1);
  if (low[0] == high[0]) {
    return nfa.sequence(nfa.literal(low.substr(0, 1)), digits_between(nfa, low_rest, high_rest));
  }
  const std::string nines(low_rest.size(), '9');
  const std::string zeros(low_rest.size(), '0');
  Part whole = nfa.sequence(nfa.literal(low.substr(0, 1)), digits_between(nfa, low_rest, nines));
  whole = nfa.either(
      whole, nfa.sequence(nfa.literal(high.substr(0, 1)), digits_between(nfa, zeros, high_rest)));
  if (low[0] + 1 < high[0]) {
    const auto rest = checked_cast<std::int32_t>(low_rest.size());
    whole = nfa.either(whole, nfa.sequence(nfa.bytes(byte(low[0] + 1), byte(high[0] - 1)),
                                           digits(nfa, rest, rest)));
  }
  return whole;
}

// Decimal spellings of low..high, both unsigned.
Part magnitudes(Nfa& nfa, std::uint64_t low, std::uint64_t high) {
  const std::string last = std::to_string(high);
  Part whole = nfa.never();
  for (std::string first = std::to_string(low);;) {
    const bool is_longest = first.size() == last.size();
    const std::string end = is_longest ? last : std::string(first.size(), '9');
    whole = nfa.either(whole, digits_between(nfa, first, end));
    if (is_longest) {
      return whole;
    }
    first.assign(first.size() + 1, '0');
    first[0] = '1';
  }
}

// A byte of a string's characters as JSON spells it.
void add_escaped(Nfa& nfa, std::int32_t from, std::uint8_t byte, std::int32_t to) {
  constexpr std::string_view kShort = "\"\\\b\f\n\r\t";
  constexpr std::string_view kLetters = "\"\\bfnrt";
  const std::size_t at = kShort.find(static_cast<char>(byte));
  const Part spelling =
      nfa.literal(at != kShort.npos ? fmt::format("\\{}", kLetters[at])
                                    : fmt::format("\\u{:04x}", static_cast<unsigned>(byte)));
  nfa.add_empty_edge(from, spelling.start);
  nfa.add_empty_edge(spelling.end, to);
}

void add_encoded(Nfa& nfa, std::int32_t from, ByteEdge edge, std::int32_t to) {
  const auto is_plain = [](std::uint32_t byte) {
    return byte >= 0x20 && byte != '"' && byte != '\\';
  };
  for (std::uint32_t low = edge.low; low <= edge.high;) {
    if (!is_plain(low)) {
      add_escaped(nfa, from, checked_cast<std::uint8_t>(low), to);
      ++low;
      continue;
    }
    std::uint32_t high = low;
    while (high < edge.high && is_plain(high + 1)) {
      ++high;
    }
    nfa.add_edge(from, {checked_cast<std::uint8_t>(low), checked_cast<std::uint8_t>(high), to});
    low = high + 1;
  }
}

}  // namespace

IntegerRange widest_integers() {
  std::int64_t high = 9;
  for (std::int32_t i = 1; i < kMaxIntegerDigits; ++i) {
    high = high * 10 + 9;
  }
  return {-high, high};
}

Part JsonRules::all_of(Nfa& nfa, std::initializer_list<Part> parts) {
  return chain(nfa, parts);
}

Part JsonRules::spaced(Nfa& nfa, std::string_view literal) {
  return chain(nfa, {space(nfa), nfa.literal(literal), space(nfa)});
}

std::int32_t JsonRules::shared(const std::string& name, const std::function<Part(Nfa&)>& build) {
  if (const auto place = shared_.find(name); place != shared_.end()) {
    return place->second;
  }
  const std::int32_t rule = add_rule();
  shared_.emplace(name, rule);  // first: the rule may call itself
  Nfa nfa(budget_);
  const Part whole = build(nfa);
  define(rule, budget_.exhausted() ? Dfa{} : nfa.determinize(whole));
  return rule;
}

std::int32_t JsonRules::space_rule() {
  return shared("space", [&](Nfa& nfa) {
    Part indent = nfa.literal("\n");
    for (std::int32_t i = 0; i < kMaxIndent; ++i) {
      indent = nfa.sequence(indent, nfa.optional(nfa.literal(" ")));
    }
    return nfa.either(nfa.literal(" "), indent);
  });
}

Part JsonRules::short_character(Nfa& nfa) {
  return nfa.either(nfa.chars(plain_set()),
                    nfa.sequence(nfa.literal("\\"), one_of(nfa, "\"\\bfnrt")));
}

std::int32_t JsonRules::plain_character() {
  return shared("plain character", [&](Nfa& nfa) { return nfa.chars(CharSet::all()); });
}

std::int32_t JsonRules::character() {
  return shared("character", [&](Nfa& nfa) {
    const Part slash = nfa.literal("\\/");
    return nfa.either(nfa.either(short_character(nfa), slash), unicode_escape(nfa));
  });
}

Part JsonRules::string_part(Nfa& nfa) {
  const Part slash = nfa.literal("\\/");
  const Part any = nfa.either(nfa.either(short_character(nfa), slash), unicode_escape(nfa));
  return chain(nfa, {nfa.literal("\""), nfa.star(any), nfa.literal("\"")});
}

std::int32_t JsonRules::any_string() {
  return shared("string", [&](Nfa& nfa) { return string_part(nfa); });
}

Part JsonRules::decimal_part(Nfa& nfa) {
  const Part first = nfa.sequence(nfa.bytes('1', '9'), digits(nfa, 0, kMaxIntegerDigits - 1));
  const Part fraction = nfa.sequence(nfa.literal("."), digits(nfa, 1, kMaxFractionDigits));
  return nfa.sequence(nfa.either(nfa.literal("0"), first), nfa.optional(fraction));
}

Part JsonRules::number_part(Nfa& nfa) {
  const Part exponent = chain(nfa, {one_of(nfa, "eE"), nfa.optional(one_of(nfa, "+-")),
                                    digits(nfa, 1, kMaxExponentDigits)});
  return chain(nfa, {nfa.optional(nfa.literal("-")), decimal_part(nfa), nfa.optional(exponent)});
}

std::int32_t JsonRules::number_between(const std::optional<NumberBound>& low,
                                       const std::optional<NumberBound>& high) {
  Nfa nfa(budget_);
  const Part plain = decimal_part(nfa);
  const std::int32_t rule = add_rule();
  define(rule, numbers_between(low, high, nfa.determinize(plain), budget_));
  return rule;
}

std::int32_t JsonRules::number() {
  return shared("number", [&](Nfa& nfa) { return number_part(nfa); });
}

std::int32_t JsonRules::integer(IntegerRange range) {
  return shared(fmt::format("integer {} {}", range.low, range.high), [&](Nfa& nfa) {
    const auto magnitude = [](std::int64_t value) {
      const auto bits = static_cast<std::uint64_t>(value);
      return value < 0 ? 0 - bits : bits;  // of the smallest value too
    };
    Part whole = nfa.never();
    if (range.low <= range.high && range.high >= 0) {
      whole = nfa.either(whole, magnitudes(nfa, magnitude(std::max<std::int64_t>(range.low, 0)),
                                           magnitude(range.high)));
    }
    if (range.low <= range.high && range.low < 0) {
      const Part below =
          magnitudes(nfa, magnitude(std::min<std::int64_t>(range.high, -1)), magnitude(range.low));
      whole = nfa.either(whole, nfa.sequence(nfa.literal("-"), below));
    }
    return whole;
  });
}

std::int32_t JsonRules::string_of_length(std::int32_t min, std::int32_t max) {
  return shared(fmt::format("string {} {}", min, max), [&](Nfa& nfa) {
    return chain(nfa, {nfa.literal("\""), nfa.call(character(), min, max), nfa.literal("\"")});
  });
}

std::int32_t JsonRules::string_of(const Dfa& decoded) {
  const std::int32_t rule = add_rule();
  Nfa nfa(budget_);
  const Part body = nfa.copy_of(decoded, [&](std::int32_t from, ByteEdge edge, std::int32_t to) {
    add_encoded(nfa, from, edge, to);
  });
  const Part whole = chain(nfa, {nfa.literal("\""), body, nfa.literal("\"")});
  define(rule, budget_.exhausted() ? Dfa{} : nfa.determinize(whole));
  return rule;
}

std::int32_t JsonRules::string_other_than(const std::vector<std::string>& names) {
  std::string key = "string other than";
  for (const std::string& name : names) {
    key += quote_json(name);
  }
  if (const auto place = shared_.find(key); place != shared_.end()) {
    return place->second;
  }
  Nfa nfa(budget_);
  const Part all = nfa.star(nfa.chars(CharSet::all()));
  const Dfa any = nfa.determinize(all);
  Nfa named(budget_);
  Part listed = named.never();
  for (const std::string& name : names) {
    listed = named.either(listed, named.literal(name));
  }
  const std::int32_t rule = string_of(subtract(any, named.determinize(listed), budget_));
  shared_.emplace(std::move(key), rule);
  return rule;
}

Part JsonRules::list(Nfa& nfa, std::string_view open, std::string_view close, std::int32_t item) {
  const Part more = nfa.star(nfa.sequence(spaced(nfa, ","), nfa.call(item)));
  const Part items = chain(nfa, {space(nfa), nfa.call(item), more});
  return chain(nfa, {nfa.literal(open), nfa.optional(items), space(nfa), nfa.literal(close)});
}

std::int32_t JsonRules::any_value() {
  return shared("value", [&](Nfa& nfa) {
    Part whole = nfa.either(nfa.literal("null"), nfa.literal("true"));
    whole = nfa.either(whole, nfa.literal("false"));
    whole = nfa.either(whole, number_part(nfa));
    whole = nfa.either(whole, string_part(nfa));
    whole = nfa.either(whole, list(nfa, "[", "]", any_value()));
    return nfa.either(whole, nfa.call(any_object()));
  });
}

std::int32_t JsonRules::any_array() {
  return shared("array", [&](Nfa& nfa) { return list(nfa, "[", "]", any_value()); });
}

std::int32_t JsonRules::any_object() {
  const std::int32_t member = shared("member", [&](Nfa& nfa) {
    return chain(nfa, {string_part(nfa), spaced(nfa, ":"), nfa.call(any_value())});
  });
  return shared("object", [&](Nfa& nfa) { return list(nfa, "{", "}", member); });
}

Part JsonRules::value(Nfa& nfa, const JsonNode& node) {
  const bool is_array = node.is(JsonKind::kArray);
  if (!is_array && !node.is(JsonKind::kObject)) {
    return nfa.literal(dump_json(node, JsonStyle::kSpaced));
  }
  Part whole = nfa.literal(is_array ? "[" : "{");
  bool is_first = true;
  const auto add = [&](Part part) {
    whole = chain(nfa, {whole, is_first ? space(nfa) : spaced(nfa, ","), part});
    is_first = false;
  };
  for (const JsonNode& item : node.items) {
    add(value(nfa, item));
  }
  for (const JsonMember& member : node.members) {
    const JsonNode key{JsonKind::kString, member.key, {}, {}};
    add(chain(nfa, {value(nfa, key), spaced(nfa, ":"), value(nfa, member.value)}));
  }
  return chain(nfa, {whole, space(nfa), nfa.literal(is_array ? "]" : "}")});
}

}  // namespace tandem::grammar
