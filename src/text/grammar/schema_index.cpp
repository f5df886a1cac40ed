#include "text/grammar/schema_index.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>
#include <vector>

#include "core/checked_cast.h"
#include "text/grammar/regex.h"
#include "text/grammar/string_formats.h"

namespace tandem::grammar {
namespace {

enum class Shape {
  kIgnored,     // says nothing about which values are valid
  kSchema,      // a schema
  kSchemaList,  // a list of schemas, not empty
  kSchemaMap,   // an object of schemas
  kTypes,       // a type's name, or a list of them
  kAny,         // any value
  kList,        // a list of values, not empty
  kNames,       // a list of strings
  kCount,
  kNumber,
  kPattern,
  kFormat,
  kReference,
  kFalse,  // supported as false only, which changes nothing
};

struct Keyword {
  std::string_view name;
  Shape shape;
};

constexpr auto kKeywords = std::to_array<Keyword>({
    {"type", Shape::kTypes},
    {"enum", Shape::kList},
    {"const", Shape::kAny},
    {"properties", Shape::kSchemaMap},
    {"required", Shape::kNames},
    {"additionalProperties", Shape::kSchema},
    {"items", Shape::kSchema},
    {"prefixItems", Shape::kSchemaList},
    {"minItems", Shape::kCount},
    {"maxItems", Shape::kCount},
    {"uniqueItems", Shape::kFalse},
    {"minLength", Shape::kCount},
    {"maxLength", Shape::kCount},
    {"pattern", Shape::kPattern},
    {"format", Shape::kFormat},
    {"minimum", Shape::kNumber},
    {"maximum", Shape::kNumber},
    {"exclusiveMinimum", Shape::kNumber},
    {"exclusiveMaximum", Shape::kNumber},
    {"anyOf", Shape::kSchemaList},
    {"oneOf", Shape::kSchemaList},
    {"allOf", Shape::kSchemaList},
    {"$ref", Shape::kReference},
    {"$defs", Shape::kSchemaMap},
    {"definitions", Shape::kSchemaMap},
    {"title", Shape::kIgnored},
    {"description", Shape::kIgnored},
    {"default", Shape::kIgnored},
    {"example", Shape::kIgnored},
    {"examples", Shape::kIgnored},
    {"deprecated", Shape::kIgnored},
    {"readOnly", Shape::kIgnored},
    {"writeOnly", Shape::kIgnored},
    {"$schema", Shape::kIgnored},
    {"$id", Shape::kIgnored},
    {"$comment", Shape::kIgnored},
});

constexpr std::array<std::string_view, 7> kTypeNames = {"null",   "boolean", "integer", "number",
                                                        "string", "array",   "object"};
constexpr std::size_t kMaxListed = 16;  // unsupported keywords in a message

std::optional<Shape> shape_of(std::string_view keyword) {
  if (keyword.starts_with("x-")) {
    return Shape::kIgnored;
  }
  const auto place = std::find_if(kKeywords.begin(), kKeywords.end(),
                                  [&](const Keyword& known) { return known.name == keyword; });
  return place == kKeywords.end() ? std::nullopt : std::optional(place->shape);
}

std::string escaped(std::string_view token) {
  std::string out;
  for (const char c : token) {
    out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  }
  return out;
}

// A reference token of a URI fragment: %XX, then ~1 and ~0.
std::string unescaped(std::string_view token) {
  std::string plain;
  for (std::size_t i = 0; i < token.size(); ++i) {
    unsigned byte = 0;
    const char* const digits = token.data() + i + 1;
    if (token[i] == '%' && i + 2 < token.size() &&
        std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      plain += static_cast<char>(byte);
      i += 2;
    } else {
      plain += token[i];
    }
  }
  std::string out;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const bool is_escape = plain[i] == '~' && i + 1 < plain.size();
    if (is_escape && (plain[i + 1] == '0' || plain[i + 1] == '1')) {
      out += plain[++i] == '0' ? '~' : '/';
    } else {
      out += plain[i];
    }
  }
  return out;
}

const JsonNode* child_of(const JsonNode& node, const std::string& token) {
  if (!node.is(JsonKind::kArray)) {
    return node.find(token);
  }
  std::size_t idx = 0;
  const auto [end, error] = std::from_chars(token.data(), token.data() + token.size(), idx);
  const bool is_index = error == std::errc() && end == token.data() + token.size();
  return is_index && idx < node.items.size() ? &node.items[idx] : nullptr;
}

const JsonNode* follow(const JsonNode& root, std::string_view reference) {
  if (!reference.starts_with("#") || (reference.size() > 1 && reference[1] != '/')) {
    return nullptr;
  }
  const JsonNode* node = &root;
  std::string_view rest = reference.substr(1);
  while (node != nullptr && !rest.empty()) {
    rest.remove_prefix(1);
    const std::size_t end = std::min(rest.find('/'), rest.size());
    node = child_of(*node, unescaped(rest.substr(0, end)));
    rest.remove_prefix(end);
  }
  return node;
}

}  // namespace

class SchemaChecker {
 public:
  SchemaChecker(SchemaIndex& index, const GrammarLimits& limits) : index_(index), limits_(limits) {}

  Status check_all() {
    if (Status status = check(*index_.root_, nullptr, "", 0); !status) {
      return status;
    }
    if (!unsupported_.empty()) {
      const std::size_t shown = std::min(unsupported_.size(), kMaxListed);
      unsupported_.resize(shown);
      return fail("not supported: {}{}", fmt::format("{}", fmt::join(unsupported_, ", ")),
                  shown == kMaxListed ? ", ..." : "");
    }
    for (const auto& [schema, reference] : references_) {
      const JsonNode* target = follow(*index_.root_, reference->text);
      if (target == nullptr || !index_.places_.contains(target)) {
        return at(*schema, "/$ref",
                  fmt::format("\"{}\" names no schema of this document", reference->text));
      }
    }
    return Ok{};
  }

 private:
  [[nodiscard]] Failure at(const JsonNode& schema, std::string_view path,
                           std::string_view what) const {
    return fail("{}{}: {}", index_.pointer_of(schema), path, what);
  }

  Status check(const JsonNode& schema, const JsonNode* parent, std::string path,
               std::int64_t depth) {
    index_.places_.emplace(&schema, SchemaIndex::Place{parent, std::move(path)});
    if (schema.is(JsonKind::kBoolean)) {
      return Ok{};
    }
    if (!schema.is(JsonKind::kObject)) {
      return at(schema, "", "expected a schema: an object, true or false");
    }
    if (depth >= limits_.max_depth) {
      return at(schema, "", fmt::format("schemas are nested deeper than {}", limits_.max_depth));
    }
    for (const JsonMember& member : schema.members) {
      if (Status status = check_keyword(schema, member, depth); !status) {
        return status;
      }
    }
    return Ok{};
  }

  Status check_keyword(const JsonNode& schema, const JsonMember& member, std::int64_t depth) {
    const std::string path = fmt::format("/{}", escaped(member.key));
    const JsonNode& value = member.value;
    const auto shape = shape_of(member.key);
    if (!shape || (*shape == Shape::kFalse && (!value.is(JsonKind::kBoolean) || value.is_true()))) {
      unsupported_.push_back(index_.pointer_of(schema) + path);
      return Ok{};
    }
    switch (*shape) {
      case Shape::kSchema:
        return check(value, &schema, path, depth + 1);
      case Shape::kSchemaList:
        if (!value.is(JsonKind::kArray) || value.items.empty()) {
          return at(schema, path, "expected a list of schemas, not empty");
        }
        for (std::size_t i = 0; i < value.items.size(); ++i) {
          const Status status =
              check(value.items[i], &schema, fmt::format("{}/{}", path, i), depth + 1);
          if (!status) {
            return status;
          }
        }
        return Ok{};
      case Shape::kSchemaMap:
        if (!value.is(JsonKind::kObject)) {
          return at(schema, path, "expected an object of schemas");
        }
        for (const JsonMember& entry : value.members) {
          const Status status =
              check(entry.value, &schema, path + "/" + escaped(entry.key), depth + 1);
          if (!status) {
            return status;
          }
        }
        return Ok{};
      default:
        return check_value(schema, path, *shape, value);
    }
  }

  Status check_value(const JsonNode& schema, const std::string& path, Shape shape,
                     const JsonNode& value) {
    const auto expect = [&](bool holds, std::string_view what) -> Status {
      return holds ? Status(Ok{}) : Status(at(schema, path, what));
    };
    const auto all_strings = [](const JsonNode& list) {
      return std::all_of(list.items.begin(), list.items.end(),
                         [](const JsonNode& item) { return item.is(JsonKind::kString); });
    };
    switch (shape) {
      case Shape::kTypes:
        return check_types(schema, path, value);
      case Shape::kList:
        return expect(value.is(JsonKind::kArray) && !value.items.empty(),
                      "expected a list of values, not empty");
      case Shape::kNames:
        return expect(value.is(JsonKind::kArray) && all_strings(value),
                      "expected a list of strings");
      case Shape::kNumber:
        return expect(value.is(JsonKind::kNumber), "expected a number");
      case Shape::kCount: {
        const auto count = count_of(value);
        return expect(count.ok(), count.ok() ? "" : count.message());
      }
      case Shape::kPattern: {
        if (!value.is(JsonKind::kString)) {
          return at(schema, path, "expected a string");
        }
        const auto regex = parse_regex(value.text, limits_.max_depth);
        return expect(regex.ok(), regex.ok() ? "" : regex.message());
      }
      case Shape::kFormat:
        if (!value.is(JsonKind::kString)) {
          return at(schema, path, "expected a string");
        }
        if (format_pattern(value.text).empty()) {
          unsupported_.push_back(
              fmt::format("{}{} \"{}\"", index_.pointer_of(schema), path, value.text));
        }
        return Ok{};
      case Shape::kReference:
        references_.emplace_back(&schema, &value);
        return expect(value.is(JsonKind::kString), "expected a string");
      default:
        return Ok{};
    }
  }

  Status check_types(const JsonNode& schema, const std::string& path, const JsonNode& value) {
    const auto is_known = [](const JsonNode& name) {
      return name.is(JsonKind::kString) &&
             std::find(kTypeNames.begin(), kTypeNames.end(), name.text) != kTypeNames.end();
    };
    const bool is_list = value.is(JsonKind::kArray) && !value.items.empty() &&
                         std::all_of(value.items.begin(), value.items.end(), is_known);
    if (!is_list && !is_known(value)) {
      return at(schema, path,
                fmt::format("expected one of {}, or a list of them",
                            fmt::format("{}", fmt::join(kTypeNames, ", "))));
    }
    return Ok{};
  }

  SchemaIndex& index_;
  const GrammarLimits& limits_;
  std::vector<std::string> unsupported_;
  std::vector<std::pair<const JsonNode*, const JsonNode*>> references_;  // schema, value
};

Expected<SchemaIndex> SchemaIndex::create(const JsonNode& root, const GrammarLimits& limits) {
  SchemaIndex index;
  index.root_ = &root;
  if (const Status status = SchemaChecker(index, limits).check_all(); !status) {
    return status.failure();
  }
  return index;
}

const JsonNode& SchemaIndex::target_of(std::string_view reference) const {
  const JsonNode* target = follow(*root_, reference);
  TDM_CHECK(target != nullptr, reference);
  return *target;
}

std::string SchemaIndex::pointer_of(const JsonNode& schema) const {
  std::string pointer;
  for (const JsonNode* node = &schema; node != nullptr;) {
    const auto place = places_.find(node);
    if (place == places_.end()) {
      break;  // a schema of our own
    }
    pointer.insert(0, place->second.path);
    node = place->second.parent;
  }
  return fmt::format("#{}", pointer);
}

Expected<std::int32_t> count_of(const JsonNode& value) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max() - 1;
  std::string_view text = value.text;
  if (text.ends_with(".0")) {
    text.remove_suffix(2);
  }
  std::int32_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (!value.is(JsonKind::kNumber) || error != std::errc() || end != text.data() + text.size() ||
      count < 0 || count > kMost) {
    return fail("expected a whole number from 0 to {}", kMost);
  }
  return count;
}

}  // namespace tandem::grammar
