// schema_facts.h — what several schemas that hold together (allOf, $ref with neighbours) say about
// one value, keyword by keyword.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "text/grammar.h"
#include "text/grammar/json_rules.h"
#include "text/grammar/schema_index.h"
#include "text/json_text.h"

namespace tandem::grammar {

/// A schema, and what of it stands in the set as parts of its own already: the targets of its
/// reference and allOf, a choice from its alternatives.
struct SchemaPart {
  const JsonNode* schema = nullptr;
  bool flattened = false;
  bool any_of_done = false;
  bool one_of_done = false;

  auto operator<=>(const SchemaPart&) const = default;
};

/// Schemas that hold together, in the order in which they were met: it decides the order of
/// properties.
using SchemaSet = std::vector<SchemaPart>;

enum TypeBit : std::uint32_t {
  kNullBit = 1,
  kBooleanBit = 2,
  kIntegerBit = 4,
  kNumberBit = 8,  // numbers that are no integers; a number in JSON schema is both bits
  kStringBit = 16,
  kArrayBit = 32,
  kObjectBit = 64,
  kAllTypes = 127,
};

struct PropertyFacts {
  std::string name;
  SchemaSet schemas;
  bool required = false;
};

struct ObjectFacts {
  std::vector<PropertyFacts> properties;  // in order of appearance
  bool more = true;                       // others may follow, each of `additional`
  SchemaSet additional;
};

struct ArrayFacts {
  std::vector<SchemaSet> prefix;
  bool more = true;
  SchemaSet rest;
  std::int32_t min = 0;
  std::int32_t max = kUnbounded;
};

struct StringFacts {
  std::int32_t min = 0;
  std::int32_t max = kUnbounded;
  std::vector<std::string> patterns;
  std::vector<std::string> formats;

  [[nodiscard]] bool has_length() const { return min > 0 || max != kUnbounded; }
};

/// Which types are left. Without any "type" they follow from the other keywords: a schema with
/// "properties" means objects.
[[nodiscard]] std::uint32_t types_of(const SchemaSet& set);
/// The values of "enum" and "const" that are left; none when there are no such keywords.
[[nodiscard]] std::optional<std::vector<JsonNode>> listed_values(const SchemaSet& set);
/// A keyword beside "enum" or "const" that is not looked at there; empty: none.
[[nodiscard]] std::string unchecked_beside_values(const SchemaSet& set);
[[nodiscard]] ObjectFacts object_facts(const SchemaSet& set, SchemaDefaults defaults);
[[nodiscard]] ArrayFacts array_facts(const SchemaSet& set);
[[nodiscard]] StringFacts string_facts(const SchemaSet& set);
/// An empty range: low > high.
[[nodiscard]] IntegerRange integer_range(const SchemaSet& set);

/// Bounds of numbers, the tightest of each side.
struct NumberFacts {
  std::optional<NumberBound> low;
  std::optional<NumberBound> high;
};
/// Errors: a Failure when a bound has more digits than numbers may have.
[[nodiscard]] Expected<NumberFacts> number_facts(const SchemaSet& set);

}  // namespace tandem::grammar
