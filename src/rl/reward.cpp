#include "rl/reward.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace tandem {
namespace {

constexpr std::string_view kBlank = " \t\r";
constexpr std::string_view kDigits = "0123456789";
constexpr std::string_view kUnicodeMinus = "\u2212";

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

std::string_view trim(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) {
    return {};
  }
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

bool consume(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) {
    return false;
  }
  text.remove_prefix(prefix.size());
  return true;
}

/// -1 or +1 for a sign that was read, 0 for none.
int consume_sign(std::string_view& text) {
  if (consume(text, "-") || consume(text, kUnicodeMinus)) {
    return -1;
  }
  return consume(text, "+") ? 1 : 0;
}

ParsedNumber malformed() {
  return {NumberStatus::kMalformed, {}};
}
ParsedNumber overflow() {
  return {NumberStatus::kOverflow, {}};
}

Uint128 gcd(Uint128 a, Uint128 b) {
  while (b != 0) {
    const Uint128 rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

ParsedNumber make_rational(bool negative, Uint128 numerator, Uint128 denominator) {
  const Uint128 divisor = gcd(numerator, denominator);
  numerator /= divisor;
  denominator /= divisor;
  constexpr Uint128 kMax = ~Uint128{0} >> 1;
  if (numerator > kMax || denominator > kMax) {
    return overflow();
  }
  const auto magnitude = static_cast<Int128>(numerator);
  return {NumberStatus::kOk, {negative ? -magnitude : magnitude, static_cast<Int128>(denominator)}};
}

/// Appends decimal digits to `value`; false on overflow.
bool accumulate_digits(std::string_view digits, Uint128& value) {
  constexpr Uint128 kMax = ~Uint128{0};
  for (const char c : digits) {
    const auto digit = static_cast<Uint128>(c - '0');
    if (value > (kMax - digit) / 10) {
      return false;
    }
    value = value * 10 + digit;
  }
  return true;
}

/// Digits with thousands separators ("," or the thin space "\,") only in groups of three; nullopt
/// when ill-formed.
std::optional<std::string> grouped_digits(std::string_view text) {
  std::string digits;
  bool has_separator = false;
  std::size_t group_size = 0;
  while (!text.empty()) {
    if (is_digit(text.front())) {
      digits += text.front();
      text.remove_prefix(1);
      ++group_size;
    } else if (consume(text, ",") || consume(text, "\\,")) {
      if (has_separator ? group_size != 3 : (group_size < 1 || group_size > 3)) {
        return std::nullopt;
      }
      has_separator = true;
      group_size = 0;
    } else {
      return std::nullopt;
    }
  }
  if (group_size == 0 || (has_separator && group_size != 3)) {
    return std::nullopt;
  }
  return digits;
}

/// A sign-less integer, decimal or a/b.
ParsedNumber parse_unsigned(bool negative, std::string_view text) {
  if (const std::size_t slash = text.find('/'); slash != std::string_view::npos) {
    const auto top = grouped_digits(text.substr(0, slash));
    const auto bottom = grouped_digits(text.substr(slash + 1));
    Uint128 numerator = 0;
    Uint128 denominator = 0;
    if (!top || !bottom || bottom->find_first_not_of('0') == std::string::npos) {
      return malformed();
    }
    if (!accumulate_digits(*top, numerator) || !accumulate_digits(*bottom, denominator)) {
      return overflow();
    }
    return make_rational(negative, numerator, denominator);
  }
  const std::size_t point = text.find('.');
  const std::string_view whole_text = text.substr(0, point);
  std::string_view fraction;
  if (point != std::string_view::npos) {
    fraction = text.substr(point + 1);
    if (fraction.empty() || fraction.find_first_not_of(kDigits) != std::string_view::npos) {
      return malformed();
    }
    // Trailing zeros say nothing and must not overflow: keep up to the last other digit.
    fraction = fraction.substr(0, fraction.find_last_not_of('0') + 1);
  }
  const bool has_whole = !(whole_text.empty() && point != std::string_view::npos);
  const auto whole = has_whole ? grouped_digits(whole_text) : std::optional<std::string>("0");
  if (!whole) {
    return malformed();
  }
  Uint128 numerator = 0;
  Uint128 denominator = 0;
  std::string scale(fraction.size() + 1, '0');
  scale[0] = '1';
  if (!accumulate_digits(*whole, numerator) || !accumulate_digits(fraction, numerator) ||
      !accumulate_digits(scale, denominator)) {
    return overflow();
  }
  return make_rational(negative, numerator, denominator);
}

/// The inside of the first `{...}` of `text`, which is removed with its braces; no nesting.
std::optional<std::string_view> consume_braces(std::string_view& text) {
  const std::size_t close = text.find('}');
  if (!text.starts_with('{') || close == std::string_view::npos) {
    return std::nullopt;
  }
  const std::string_view inside = text.substr(1, close - 1);
  text.remove_prefix(close + 1);
  return inside;
}

/// `{a}{b}` after \frac; the parts may carry a sign only where the whole has none.
ParsedNumber parse_fraction(int sign, std::string_view text) {
  const auto top = consume_braces(text);
  const auto bottom = top ? consume_braces(text) : std::nullopt;
  if (!bottom || !text.empty()) {
    return malformed();
  }
  bool negative = sign < 0;
  std::array<std::string_view, 2> parts = {trim(*top), trim(*bottom)};
  for (std::string_view& part : parts) {
    const int part_sign = consume_sign(part);
    if (part_sign != 0 && sign != 0) {
      return malformed();
    }
    negative ^= part_sign < 0;
    if (part.find('/') != std::string_view::npos) {
      return malformed();
    }
  }
  return parse_unsigned(negative, fmt::format("{}/{}", parts[0], parts[1]));
}

/// `text` without every "\!" (a negative thin space) and without a "\," at either end.
std::string without_thin_spaces(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    if (!consume(text, "\\!")) {
      out += text.front();
      text.remove_prefix(1);
    }
  }
  while (out.starts_with("\\,")) {
    out.erase(0, 2);
  }
  while (out.ends_with("\\,")) {
    out.erase(out.size() - 2);
  }
  return out;
}

std::string_view strip_pair(std::string_view text, std::string_view open, std::string_view close) {
  if (text.size() >= open.size() + close.size() && text.starts_with(open) &&
      text.ends_with(close)) {
    text.remove_prefix(open.size());
    text.remove_suffix(close.size());
  }
  return text;
}

/// Where an answer was found: its inside, and whether a newline or the end of the sequence follows.
struct Candidate {
  std::string_view inside;
  bool is_complete = false;
};

/// The last line whose first non-blank characters are "####". Lines end at '\n' only.
std::optional<Candidate> last_answer_line(std::string_view text, bool finished) {
  std::size_t end = text.size();
  bool has_newline = false;
  while (true) {
    const std::size_t newline = end == 0 ? std::string_view::npos : text.rfind('\n', end - 1);
    const std::size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
    std::string_view line = trim(text.substr(begin, end - begin));
    if (consume(line, "####")) {
      return Candidate{line, has_newline || finished};
    }
    if (newline == std::string_view::npos) {
      return std::nullopt;
    }
    end = newline;
    has_newline = true;
  }
}

/// The last `\boxed{...}` whose braces balance. One pass with a stack, so that hostile text costs
/// no more.
std::optional<Candidate> last_boxed(std::string_view text, bool finished) {
  constexpr std::string_view kBoxed = "\\boxed";
  std::vector<std::size_t> open_braces;
  std::optional<std::pair<std::size_t, std::size_t>> last;  // [begin, end) of the inside
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '{') {
      open_braces.push_back(i);
    } else if (text[i] == '}' && !open_braces.empty()) {
      const std::size_t open = open_braces.back();
      open_braces.pop_back();
      if (text.substr(0, open).ends_with(kBoxed) && (!last || open + 1 > last->first)) {
        last = {open + 1, i};
      }
    }
  }
  if (!last) {
    return std::nullopt;
  }
  const bool has_newline = text.find('\n', last->second) != std::string_view::npos;
  return Candidate{text.substr(last->first, last->second - last->first), has_newline || finished};
}

std::optional<Candidate> find_answer(RewardType type, std::string_view text, bool finished) {
  auto candidate = last_answer_line(text, finished);
  if (!candidate && type == RewardType::kGsm8k) {
    candidate = last_boxed(text, finished);
  }
  return candidate;
}

}  // namespace

ParsedNumber parse_answer_number(std::string_view text) {
  text = trim(text);
  const std::string_view unwrapped = strip_pair(text, "\\(", "\\)");
  text = trim(unwrapped.size() == text.size() ? strip_pair(text, "$", "$") : unwrapped);
  const std::string cleaned = without_thin_spaces(text);
  std::string_view rest = trim(cleaned);
  if (rest.ends_with('.')) {
    rest = trim(rest.substr(0, rest.size() - 1));
  }
  if (rest.ends_with('%') || rest.ends_with("\\%")) {
    rest = trim(rest.substr(0, rest.size() - (rest.ends_with("\\%") ? 2 : 1)));
  }
  int sign = consume_sign(rest);
  for (const std::string_view currency : {"\\$", "$", "\u00a3", "\u20ac"}) {
    if (consume(rest, currency)) {
      rest = trim(rest);
      break;
    }
  }
  if (sign == 0) {
    sign = consume_sign(rest);
  }
  if (consume(rest, "\\frac") || consume(rest, "\\dfrac")) {
    return parse_fraction(sign, rest);
  }
  return parse_unsigned(sign < 0, rest);
}

std::string_view to_string(RewardStatus status) {
  constexpr std::array<std::string_view, 5> kNames = {"correct", "wrong", "no_answer", "malformed",
                                                      "truncated"};
  return kNames.at(static_cast<std::size_t>(status));
}

Expected<RewardType> parse_reward_type(std::string_view rm_type) {
  if (rm_type == "gsm8k") {
    return RewardType::kGsm8k;
  }
  if (rm_type == "arithmetic") {
    return RewardType::kArithmetic;
  }
  return fail("rm_type: expected gsm8k or arithmetic, got '{}'{}", rm_type,
              rm_type == "flexible" ? " (flexible is a metric: it pays any trailing number)" : "");
}

Expected<Rational> parse_gold(std::string_view label) {
  const auto candidate = find_answer(RewardType::kGsm8k, label, true);
  const ParsedNumber number = parse_answer_number(candidate ? candidate->inside : label);
  if (number.status != NumberStatus::kOk) {
    return fail("label: expected a number or a text that ends in '#### <number>', got '{}'",
                label.substr(0, 200));
  }
  return number.value;
}

RewardResult grade(RewardType type, std::string_view response, const Rational& gold,
                   bool finished) {
  const auto candidate = find_answer(type, response, finished);
  if (!candidate) {
    return {0.0, finished ? RewardStatus::kNoAnswer : RewardStatus::kTruncated};
  }
  if (!candidate->is_complete) {
    return {0.0, RewardStatus::kTruncated};
  }
  const ParsedNumber number = parse_answer_number(candidate->inside);
  if (number.status == NumberStatus::kMalformed) {
    return {0.0, RewardStatus::kMalformed};
  }
  const bool is_correct = number.status == NumberStatus::kOk && number.value == gold;
  return {is_correct ? 1.0 : 0.0, is_correct ? RewardStatus::kCorrect : RewardStatus::kWrong};
}

bool flexible_match(std::string_view response, const Rational& gold) {
  std::size_t end = response.find_last_of(kDigits);
  if (end == std::string_view::npos) {
    return false;
  }
  std::size_t begin = end;
  while (begin > 0 && (is_digit(response[begin - 1]) || response[begin - 1] == ',' ||
                       response[begin - 1] == '.')) {
    --begin;
  }
  while (!is_digit(response[begin])) {
    ++begin;  // punctuation before the number belongs to the sentence
  }
  const bool is_negative = begin > 0 && response[begin - 1] == '-';
  const ParsedNumber number = parse_answer_number(
      response.substr(begin - (is_negative ? 1U : 0U), end + 1 - begin + (is_negative ? 1U : 0U)));
  return number.status == NumberStatus::kOk && number.value == gold;
}

}  // namespace tandem
