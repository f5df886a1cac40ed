// json_text.h — JSON as text in, text out, spelled as Python's json module spells it: prompts must
// match the reference renderer to the byte, down to 1e16 and 2**70. Only inside text/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace tandem {

struct JsonMember;

enum class JsonKind { kNull, kBoolean, kNumber, kString, kArray, kObject };

/// "null", "boolean", ..., as JSON schema names them.
[[nodiscard]] std::string_view json_kind_name(JsonKind kind);

struct JsonNode {
  JsonKind kind = JsonKind::kNull;
  std::string text;                 ///< a string's characters; other scalars as Python spells them
  std::vector<JsonNode> items;      ///< of an array
  std::vector<JsonMember> members;  ///< of an object, keys unique, in order of first appearance

  /// The member's value; nullptr when this is no object or has no such key.
  [[nodiscard]] const JsonNode* find(std::string_view key) const;
  [[nodiscard]] bool is(JsonKind other) const { return kind == other; }
  [[nodiscard]] bool is_true() const { return kind == JsonKind::kBoolean && text == "true"; }
};

struct JsonMember {
  std::string key;
  JsonNode value;
};

/// Parses one JSON text. A repeated key keeps its first place and its last value.
/// Errors: a Failure with the position; also for nesting deeper than 256.
[[nodiscard]] Expected<JsonNode> parse_json(std::string_view text);

enum class JsonStyle {
  kSpaced,  ///< separators ", " and ": ", keys in their order: json.dumps(ensure_ascii=False)
  kCompactSorted,  ///< separators "," and ":", keys sorted by code point on every level
};

[[nodiscard]] std::string dump_json(const JsonNode& node, JsonStyle style);

/// `text`, which must be UTF-8, as a JSON string with its quotes.
[[nodiscard]] std::string quote_json(std::string_view text);

}  // namespace tandem
