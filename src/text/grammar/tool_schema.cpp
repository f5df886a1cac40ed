#include "text/grammar/tool_schema.h"

#include <array>
#include <utility>

#include "core/checked_cast.h"
#include "text/grammar/compiled.h"
#include "text/grammar/json_rules.h"
#include "text/grammar/json_schema.h"
#include "text/grammar/schema_index.h"
#include "text/json_text.h"

namespace tandem::grammar {
namespace {

constexpr std::array<std::string_view, 6> kTypes = {"string", "number", "boolean",
                                                    "null",   "object", "array"};
// Each argument may be followed by any later one up to a required one, so ways grow as the square.
constexpr std::size_t kMaxProperties = 128;

JsonNode type_schema(std::string_view type) {
  JsonNode name{JsonKind::kString, std::string(type), {}, {}};
  return {JsonKind::kObject, "", {}, {{"type", std::move(name)}}};
}

// What distinguishes a property's texts, without what is said about it in words.
std::string key_of(const SchemaSet& schemas, const std::string& document) {
  std::string key;
  for (const SchemaPart& part : schemas) {
    JsonNode plain = *part.schema;
    std::erase_if(plain.members, [](const JsonMember& member) {
      return member.key == "description" || member.key == "title" || member.key == "default" ||
             member.key == "examples";
    });
    key += dump_json(plain, JsonStyle::kCompactSorted) + "\n";
  }
  return key.find("$ref") == key.npos ? key : key + document;
}

}  // namespace

ToolTexts::ToolTexts(std::shared_ptr<const TokenTrie> trie, std::int32_t end,
                     const GrammarLimits& limits)
    : trie_(std::move(trie)), end_(end), limits_(limits) {}

std::shared_ptr<const TokenConstraint> ToolTexts::text_of(const Grammar& grammar) const {
  return grammar.make_constraint(trie_, {end_});
}

std::shared_ptr<const TokenConstraint> ToolTexts::any_text() {
  if (!any_text_) {
    any_text_ = text_of(*compile_regex("[\\s\\S]*").value_or_throw());
  }
  return any_text_;
}

Expected<std::vector<ToolProperty>> ToolTexts::properties_of(const std::string& parameters_json) {
  std::vector<ToolProperty> result;
  if (parameters_json.empty()) {
    return result;
  }
  if (isize(parameters_json) > limits_.max_source_bytes) {
    return fail("parameters: {} bytes; at most {} are supported", parameters_json.size(),
                limits_.max_source_bytes);
  }
  const auto root = parse_json(parameters_json);
  if (!root) {
    return fail("parameters: {}", root.message());
  }
  const auto index = SchemaIndex::create(*root, limits_);
  if (!index) {
    return fail("parameters: {}", index.message());
  }
  Budget budget(limits_);
  JsonRules unused(budget);
  const auto facts = object_of(*index, *root, SchemaDefaults::kClosed, unused);
  if (!facts) {
    return fail("parameters: {}", facts.message());
  }
  if (facts->properties.size() > kMaxProperties) {
    return fail("parameters: {} properties; at most {} are supported", facts->properties.size(),
                kMaxProperties);
  }
  for (const PropertyFacts& property : facts->properties) {
    ToolProperty made{property.name, property.required, {}};
    for (const std::string_view type : kTypes) {
      auto text = value_text(*index, property, type, parameters_json);
      if (!text) {
        return fail("parameters: property \"{}\": {}", property.name, text.message());
      }
      if (*text) {
        made.values.push_back({std::string(type), std::move(*text)});
      }
    }
    if (!made.values.empty()) {
      result.push_back(std::move(made));
    } else if (property.required) {
      return fail("parameters: property \"{}\": no text can match", property.name);
    }
  }
  return result;
}

Expected<std::shared_ptr<const TokenConstraint>> ToolTexts::value_text(
    const SchemaIndex& index, const PropertyFacts& property, std::string_view type,
    const std::string& document) {
  const std::string key = fmt::format("{}\n{}", type, key_of(property.schemas, document));
  if (const auto place = known_.find(key); place != known_.end()) {
    return place->second;
  }
  const JsonNode only = type_schema(type);
  SchemaSet schemas = property.schemas;
  schemas.push_back({&only});
  Budget budget(limits_);
  JsonRules rules(budget);
  const Status added = type == "string"
                           ? add_plain_string_rules(index, schemas, rules)
                           : add_value_rules(index, schemas, SchemaDefaults::kOpen, rules);
  if (!added) {
    return added.failure();
  }
  const auto grammar = link_grammar(rules.rules(), budget);
  if (!grammar) {
    return grammar.failure();
  }
  auto text = *grammar ? text_of(**grammar) : nullptr;
  known_.emplace(key, text);
  return text;
}

}  // namespace tandem::grammar
