// tool_schema.h — the arguments of a tool as K3 writes them: one text per property and JSON type,
// strings without quotes and escapes, everything else as JSON.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/grammar.h"
#include "text/grammar/schema_facts.h"
#include "text/grammar/schema_index.h"

namespace tandem::grammar {

struct ToolValue {
  std::string type;                             // "string", "number", ...
  std::shared_ptr<const TokenConstraint> text;  // at its start
};

struct ToolProperty {
  std::string name;
  bool required = false;
  std::vector<ToolValue> values;  // one for each type that the schema leaves
};

/// Makes the texts of all arguments of a request; equal ones are made once.
class ToolTexts {
 public:
  /// `end`: the token that may come where a text may end.
  ToolTexts(std::shared_ptr<const TokenTrie> trie, std::int32_t end, const GrammarLimits& limits);

  /// Text of any kind.
  [[nodiscard]] std::shared_ptr<const TokenConstraint> any_text();
  /// In the schema's order. Errors: a Failure naming the place in the schema.
  [[nodiscard]] Expected<std::vector<ToolProperty>> properties_of(
      const std::string& parameters_json);

 private:
  // Null: the schema leaves no value of this type.
  [[nodiscard]] Expected<std::shared_ptr<const TokenConstraint>> value_text(
      const SchemaIndex& index, const PropertyFacts& property, std::string_view type,
      const std::string& document);
  [[nodiscard]] std::shared_ptr<const TokenConstraint> text_of(const Grammar& grammar) const;

  std::shared_ptr<const TokenTrie> trie_;
  std::int32_t end_;
  GrammarLimits limits_;
  std::shared_ptr<const TokenConstraint> any_text_;
  // By type and schema, with the document when the schema refers to other places of it.
  std::map<std::string, std::shared_ptr<const TokenConstraint>> known_;
};

}  // namespace tandem::grammar
