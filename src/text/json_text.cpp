#include "text/json_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxDepth = 256;

// Python's repr(float): the shortest digits that read back, positional for 1e-4 <= |x| < 1e16.
std::string python_float(double value) {
  std::array<char, 40> buffer{};
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                          std::chars_format::scientific);
  TDM_CHECK(error == std::errc(), value);
  std::string_view text(buffer.data(), static_cast<std::size_t>(end - buffer.data()));
  const std::string sign = std::signbit(value) ? "-" : "";
  text.remove_prefix(sign.size());
  const std::size_t mark = text.find('e');
  std::string digits(text.substr(0, mark));
  std::erase(digits, '.');
  int exponent = 0;  // of the first digit
  const std::string_view tail = text.substr(mark + (text[mark + 1] == '+' ? 2U : 1U));
  std::from_chars(tail.data(), tail.data() + tail.size(), exponent);
  if (exponent < -4 || exponent >= 16) {
    const std::string fraction = digits.size() > 1 ? "." + digits.substr(1) : "";
    return fmt::format("{}{}{}e{}{:02}", sign, digits[0], fraction, exponent < 0 ? '-' : '+',
                       std::abs(exponent));
  }
  if (exponent < 0) {
    return sign + "0." + std::string(usize(-exponent - 1), '0') + digits;
  }
  const std::size_t whole = usize(exponent) + 1;
  if (digits.size() <= whole) {
    return sign + digits + std::string(whole - digits.size(), '0') + ".0";
  }
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

// Repeated keys: the first place, the last value, as in a Python dict.
void merge_repeated_keys(std::vector<JsonMember>& members) {
  std::unordered_map<std::string, std::size_t> places;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto [place, is_new] = places.emplace(members[i].key, kept);
    if (!is_new) {
      members[place->second].value = std::move(members[i].value);
      continue;
    }
    if (kept != i) {
      members[kept] = std::move(members[i]);
    }
    ++kept;
  }
  members.erase(members.begin() + static_cast<std::ptrdiff_t>(kept), members.end());
}

// Builds the tree from nlohmann's events. The library's own values would lose what a number looked
// like: integers beyond 64 bits become doubles there.
class TreeBuilder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return add({JsonKind::kNull, "null", {}, {}}); }
  bool boolean(bool value) override {
    return add({JsonKind::kBoolean, value ? "true" : "false", {}, {}});
  }
  bool number_integer(number_integer_t value) override {
    return add({JsonKind::kNumber, std::to_string(value), {}, {}});
  }
  bool number_unsigned(number_unsigned_t value) override {
    return add({JsonKind::kNumber, std::to_string(value), {}, {}});
  }
  bool number_float(number_float_t value, const string_t& spelling) override {
    const bool is_integer = spelling.find_first_of(".eE") == std::string::npos;
    return add({JsonKind::kNumber, is_integer ? spelling : python_float(value), {}, {}});
  }
  bool string(string_t& value) override {
    return add({JsonKind::kString, std::move(value), {}, {}});
  }
  bool binary(binary_t&) override { return false; }  // no JSON text has one
  bool start_object(std::size_t) override { return open(JsonKind::kObject); }
  bool key(string_t& value) override {
    keys_.back() = std::move(value);
    return true;
  }
  bool end_object() override {
    merge_repeated_keys(stack_.back().members);
    return close();
  }
  bool start_array(std::size_t) override { return open(JsonKind::kArray); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t, const std::string&,
                   const nlohmann::json::exception& error) override {
    message_ = error.what();
    return false;
  }

  JsonNode take_root() { return std::move(root_); }
  [[nodiscard]] const std::string& message() const { return message_; }

 private:
  bool add(JsonNode node) {
    if (stack_.empty()) {
      root_ = std::move(node);
    } else if (stack_.back().is(JsonKind::kObject)) {
      stack_.back().members.push_back({std::move(keys_.back()), std::move(node)});
    } else {
      stack_.back().items.push_back(std::move(node));
    }
    return true;
  }
  bool open(JsonKind kind) {
    if (stack_.size() == kMaxDepth) {
      message_ = fmt::format("nested deeper than {}", kMaxDepth);
      return false;
    }
    stack_.push_back({kind, "", {}, {}});
    keys_.emplace_back();
    return true;
  }
  bool close() {
    JsonNode node = std::move(stack_.back());
    stack_.pop_back();
    keys_.pop_back();
    return add(std::move(node));
  }

  JsonNode root_;
  std::vector<JsonNode> stack_;    // the open containers, outermost first
  std::vector<std::string> keys_;  // the key waiting for its value in each of them
  std::string message_;
};

void append_json(std::string& out, const JsonNode& node, JsonStyle style) {
  const std::string_view comma = style == JsonStyle::kSpaced ? ", " : ",";
  const std::string_view colon = style == JsonStyle::kSpaced ? ": " : ":";
  std::string_view separator;
  if (node.is(JsonKind::kArray)) {
    out += '[';
    for (const JsonNode& item : node.items) {
      out += separator;
      append_json(out, item, style);
      separator = comma;
    }
    out += ']';
  } else if (node.is(JsonKind::kObject)) {
    std::vector<const JsonMember*> members;
    for (const JsonMember& member : node.members) {
      members.push_back(&member);
    }
    if (style == JsonStyle::kCompactSorted) {  // byte order of UTF-8 is code point order
      std::sort(members.begin(), members.end(),
                [](const JsonMember* a, const JsonMember* b) { return a->key < b->key; });
    }
    out += '{';
    for (const JsonMember* member : members) {
      out += separator;
      out += quote_json(member->key);
      out += colon;
      append_json(out, member->value, style);
      separator = comma;
    }
    out += '}';
  } else {
    out += node.is(JsonKind::kString) ? quote_json(node.text) : node.text;
  }
}

}  // namespace

std::string_view json_kind_name(JsonKind kind) {
  switch (kind) {
    case JsonKind::kNull:
      return "null";
    case JsonKind::kBoolean:
      return "boolean";
    case JsonKind::kNumber:
      return "number";
    case JsonKind::kString:
      return "string";
    case JsonKind::kArray:
      return "array";
    case JsonKind::kObject:
      return "object";
  }
  TDM_CHECK(false);
}

const JsonNode* JsonNode::find(std::string_view key) const {
  for (const JsonMember& member : members) {
    if (member.key == key) {
      return &member.value;
    }
  }
  return nullptr;
}

Expected<JsonNode> parse_json(std::string_view text) {
  TreeBuilder builder;
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &builder)) {
    return fail("not JSON: {}", builder.message());
  }
  return builder.take_root();
}

std::string quote_json(std::string_view text) {
  return nlohmann::json(text).dump();
}

std::string dump_json(const JsonNode& node, JsonStyle style) {
  std::string out;
  append_json(out, node, style);
  return out;
}

}  // namespace tandem
