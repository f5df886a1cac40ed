#include "text/grammar/regex.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "core/checked_cast.h"
#include "text/utf8.h"

namespace tandem::grammar {
namespace {

using Kind = RegexNode::Kind;

CharSet digit_set() {
  return {{'0', '9'}};
}
CharSet word_set() {
  return {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
}
CharSet space_set() {
  return {{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
          {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
}
CharSet line_end_set() {
  return {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
}

std::optional<std::uint32_t> hex_digit(char c) {
  if (c >= '0' && c <= '9') {
    return static_cast<std::uint32_t>(c - '0');
  }
  const char lower = static_cast<char>(c | 0x20);
  if (lower >= 'a' && lower <= 'f') {
    return static_cast<std::uint32_t>(lower - 'a' + 10);
  }
  return std::nullopt;
}

class RegexParser {
 public:
  RegexParser(std::string_view text, std::int64_t max_depth) : text_(text), max_depth_(max_depth) {}

  Expected<std::vector<RegexBranch>> parse() {
    std::vector<RegexBranch> branches;
    do {
      RegexBranch branch;
      branch.at_start = take('^');
      auto node = sequence(0);
      if (!node) {
        return node.failure();
      }
      branch.node = std::move(*node);
      branch.at_end = take('$');
      branches.push_back(std::move(branch));
    } while (take('|'));
    if (at_ < text_.size()) {
      return error(text_[at_] == ')' ? "no group is open" : "expected | or the end behind $");
    }
    return branches;
  }

 private:
  [[nodiscard]] Failure error(std::string_view what) const {
    return fail("at byte {}: {}", at_, what);
  }
  [[nodiscard]] bool is_at(char c) const { return at_ < text_.size() && text_[at_] == c; }
  [[nodiscard]] bool is_at(std::string_view text) const {
    return text_.substr(at_).starts_with(text);
  }
  bool take(char c) {
    const bool found = is_at(c);
    at_ += found ? 1 : 0;
    return found;
  }

  Expected<RegexNode> either(std::int64_t depth);
  Expected<RegexNode> sequence(std::int64_t depth);
  Expected<RegexNode> quantified(RegexNode operand);
  Expected<std::pair<std::int32_t, std::int32_t>> counts();
  Expected<RegexNode> atom(std::int64_t depth);
  Expected<RegexNode> group(std::int64_t depth);
  Expected<CharSet> bracket();
  Expected<CharSet> escape(bool in_bracket);
  Expected<std::uint32_t> coded(std::size_t num_digits);
  Expected<std::uint32_t> character();

  std::string_view text_;
  std::int64_t max_depth_;
  std::size_t at_ = 0;
};

Expected<RegexNode> RegexParser::sequence(std::int64_t depth) {
  RegexNode result{Kind::kSequence};
  while (at_ < text_.size() && !is_at('|') && !is_at(')')) {
    if (is_at('$') && depth == 0) {
      break;
    }
    auto operand = atom(depth);
    if (!operand) {
      return operand;
    }
    auto item = quantified(std::move(*operand));
    if (!item) {
      return item;
    }
    result.children.push_back(std::move(*item));
  }
  return result;
}

Expected<RegexNode> RegexParser::either(std::int64_t depth) {
  RegexNode result{Kind::kEither};
  do {
    auto branch = sequence(depth);
    if (!branch) {
      return branch;
    }
    result.children.push_back(std::move(*branch));
  } while (take('|'));
  return result;
}

Expected<RegexNode> RegexParser::quantified(RegexNode operand) {
  RegexNode result{Kind::kRepeat};
  if (take('*')) {
    result.min = 0;
  } else if (take('+')) {
    result.min = 1;
  } else if (take('?')) {
    result.max = 1;
  } else if (take('{')) {
    const auto range = counts();
    if (!range) {
      return range.failure();
    }
    std::tie(result.min, result.max) = *range;
  } else {
    return operand;
  }
  take('?');  // lazy: the same texts
  if (is_at('*') || is_at('+') || is_at('?') || is_at('{')) {
    return error("nothing to repeat");
  }
  result.children.push_back(std::move(operand));
  return result;
}

Expected<std::pair<std::int32_t, std::int32_t>> RegexParser::counts() {
  const auto number = [&]() -> std::optional<std::int32_t> {
    std::int32_t value = 0;
    const std::size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      value = std::min(value * 10 + (text_[at_++] - '0'), kMaxRegexRepeat + 1);
    }
    return at_ > begin ? std::optional(value) : std::nullopt;
  };
  const auto min = number();
  if (!min) {
    return error("expected a number of repetitions behind {");
  }
  std::int32_t max = *min;
  if (take(',')) {
    max = number().value_or(kUnbounded);
  }
  if (!take('}')) {
    return error("expected } behind the repetitions");
  }
  if (*min > kMaxRegexRepeat || (max != kUnbounded && max > kMaxRegexRepeat)) {
    return error(fmt::format("repetitions are at most {}", kMaxRegexRepeat));
  }
  if (*min > max) {
    return error("the repetitions' minimum is above their maximum");
  }
  return std::pair(*min, max);
}

Expected<RegexNode> RegexParser::atom(std::int64_t depth) {
  RegexNode result{Kind::kChars};
  if (take('(')) {
    return group(depth);
  }
  if (take('[')) {
    auto set = bracket();
    if (!set) {
      return set.failure();
    }
    result.chars = std::move(*set);
    return result;
  }
  if (take('.')) {
    result.chars = line_end_set().negated();
    return result;
  }
  if (take('\\')) {
    auto set = escape(false);
    if (!set) {
      return set.failure();
    }
    result.chars = std::move(*set);
    return result;
  }
  if (is_at('^') || is_at('$')) {
    return error("anchors are supported at the ends of the expression's alternatives only");
  }
  if (is_at('*') || is_at('+') || is_at('?') || is_at('{')) {
    return error("nothing to repeat");
  }
  const auto code = character();
  if (!code) {
    return code.failure();
  }
  result.chars.add({*code, *code});
  return result;
}

Expected<RegexNode> RegexParser::group(std::int64_t depth) {
  if (depth == max_depth_) {
    return error(fmt::format("groups are nested deeper than {}", max_depth_));
  }
  if (take('?')) {
    if (is_at("=") || is_at("!") || is_at("<=") || is_at("<!")) {
      return error("lookaround is not supported");
    }
    if (take('<')) {
      const std::size_t end = text_.find('>', at_);
      if (end == text_.npos) {
        return error("expected > behind the group's name");
      }
      at_ = end + 1;
    } else if (!take(':')) {
      return error("flags and this kind of group are not supported");
    }
  }
  auto inside = either(depth + 1);
  if (inside.ok() && !take(')')) {
    return error("expected )");
  }
  return inside;
}

Expected<CharSet> RegexParser::bracket() {
  const bool is_negated = take('^');
  CharSet set;
  const auto member = [&]() -> Expected<CharSet> {
    if (take('\\')) {
      return escape(true);
    }
    const auto code = character();
    if (!code) {
      return code.failure();
    }
    return CharSet{{*code, *code}};
  };
  const auto single = [](const CharSet& chars) -> std::optional<std::uint32_t> {
    const auto ranges = chars.ranges();
    const bool is_one = ranges.size() == 1 && ranges[0].low == ranges[0].high;
    return is_one ? std::optional(ranges[0].low) : std::nullopt;
  };
  while (!is_at(']')) {
    auto low = member();
    if (!low) {
      return low;
    }
    if (is_at('-') && !is_at("-]")) {
      take('-');
      auto high = member();
      if (!high) {
        return high;
      }
      const auto first = single(*low);
      const auto last = single(*high);
      if (!first || !last || *first > *last) {
        return error("expected a range of two characters in rising order");
      }
      set.add({*first, *last});
    } else {
      set.add(*low);
    }
  }
  take(']');
  return is_negated ? set.negated() : set;
}

Expected<CharSet> RegexParser::escape(bool in_bracket) {
  if (at_ == text_.size()) {
    return error("expected a character behind \\");
  }
  const char c = text_[at_];
  const auto one = [](std::uint32_t code) { return CharSet{{code, code}}; };
  const auto numbered = [&](std::size_t num_digits) -> Expected<CharSet> {
    const auto code = coded(num_digits);
    return code ? Expected<CharSet>(one(*code)) : code.failure();
  };
  ++at_;
  switch (c) {
    case 'd':
      return digit_set();
    case 'D':
      return digit_set().negated();
    case 'w':
      return word_set();
    case 'W':
      return word_set().negated();
    case 's':
      return space_set();
    case 'S':
      return space_set().negated();
    case 'n':
      return one('\n');
    case 'r':
      return one('\r');
    case 't':
      return one('\t');
    case 'f':
      return one('\f');
    case 'v':
      return one('\v');
    case '0':
      return one(0);
    case 'x':
      return numbered(2);
    case 'u':
      return numbered(4);
    default:
      break;
  }
  const bool is_letter_or_digit =
      (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
  if (is_letter_or_digit && !(in_bracket && c == 'b')) {
    --at_;
    return error(fmt::format("\\{} is not supported", c));
  }
  if (is_letter_or_digit) {
    return one('\b');
  }
  --at_;
  const auto code = character();
  return code ? Expected<CharSet>(one(*code)) : code.failure();
}

// The digits of \xHH and \uHHHH, or \u{H...}.
Expected<std::uint32_t> RegexParser::coded(std::size_t num_digits) {
  const bool in_braces = num_digits == 4 && take('{');
  std::uint32_t code = 0;
  std::size_t count = 0;
  const std::size_t most = in_braces ? 6 : num_digits;
  while (count < most && at_ < text_.size() && hex_digit(text_[at_])) {
    code = code * 16 + hex_digit(text_[at_++]).value();
    ++count;
  }
  if (in_braces ? count == 0 || !take('}') : count != num_digits) {
    return error("expected hexadecimal digits");
  }
  if (code > kMaxCodePoint || (code >= 0xD800 && code <= 0xDFFF)) {
    return error("expected a character, not a surrogate or a number beyond 10FFFF");
  }
  return code;
}

Expected<std::uint32_t> RegexParser::character() {
  if (at_ == text_.size()) {
    return error("expected a character");
  }
  const Utf8Char next = first_utf8_char(text_.substr(at_));
  if (next.kind != Utf8Kind::kValid) {
    return error("not UTF-8");
  }
  at_ += next.length;
  return next.code;
}

class RegexWriter {
 public:
  explicit RegexWriter(Budget& budget) : budget_(budget), nfa_(budget) {}

  Dfa write(const std::vector<RegexBranch>& branches, RegexMatch match) {
    const bool searches = match == RegexMatch::kSearch;
    Nfa::Part whole = nfa_.never();
    for (const RegexBranch& branch : branches) {
      Nfa::Part part = write(branch.node);
      if (searches && !branch.at_start) {
        part = nfa_.sequence(anything(), part);
      }
      if (searches && !branch.at_end) {
        part = nfa_.sequence(part, anything());
      }
      whole = nfa_.either(whole, part);
    }
    return budget_.exhausted() ? Dfa{} : nfa_.determinize(whole);
  }

 private:
  Nfa::Part anything() { return nfa_.star(nfa_.chars(CharSet::all())); }

  Nfa::Part write(const RegexNode& node) {
    switch (node.kind) {
      case Kind::kChars:
        return nfa_.chars(node.chars);
      case Kind::kSequence: {
        Nfa::Part whole = nfa_.empty();
        for (const RegexNode& child : node.children) {
          whole = nfa_.sequence(whole, write(child));
        }
        return whole;
      }
      case Kind::kEither: {
        Nfa::Part whole = nfa_.never();
        for (const RegexNode& child : node.children) {
          whole = nfa_.either(whole, write(child));
        }
        return whole;
      }
      case Kind::kRepeat:
        return repeat(node);
    }
    TDM_CHECK(false);
  }

  Nfa::Part repeat(const RegexNode& node) {
    const RegexNode& operand = node.children.front();
    Nfa::Part whole = nfa_.empty();
    const std::int32_t copies = node.max == kUnbounded ? node.min : node.max;
    for (std::int32_t i = 0; i < copies && !budget_.exhausted(); ++i) {
      const Nfa::Part part = write(operand);
      whole = nfa_.sequence(whole, i < node.min ? part : nfa_.optional(part));
    }
    if (node.max == kUnbounded) {
      whole = nfa_.sequence(whole, nfa_.star(write(operand)));
    }
    return whole;
  }

  Budget& budget_;
  Nfa nfa_;
};

}  // namespace

Expected<std::vector<RegexBranch>> parse_regex(std::string_view pattern, std::int64_t max_depth) {
  return RegexParser(pattern, max_depth).parse();
}

Dfa regex_dfa(const std::vector<RegexBranch>& branches, RegexMatch match, Budget& budget) {
  return RegexWriter(budget).write(branches, match);
}

}  // namespace tandem::grammar
