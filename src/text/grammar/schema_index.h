// schema_index.h — a JSON schema that has been looked through: every keyword is known and has the
// shape it must have, every reference leads to a schema.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "text/grammar.h"
#include "text/json_text.h"

namespace tandem::grammar {

class SchemaIndex {
 public:
  /// `root` must outlive the index. Errors: a Failure naming the place by its JSON pointer and
  /// what was expected, or listing all unsupported keywords.
  static Expected<SchemaIndex> create(const JsonNode& root, const GrammarLimits& limits);

  /// The schema that a "$ref" of this document names.
  [[nodiscard]] const JsonNode& target_of(std::string_view reference) const;
  /// JSON pointer of a schema; "#" is the document itself.
  [[nodiscard]] std::string pointer_of(const JsonNode& schema) const;

 private:
  friend class SchemaChecker;
  struct Place {
    const JsonNode* parent = nullptr;  // the schema around it
    std::string path;                  // from there
  };

  const JsonNode* root_ = nullptr;
  std::unordered_map<const JsonNode*, Place> places_;  // every schema
};

/// The count that a keyword such as minItems holds. Errors: a Failure when it is none, or is above
/// 2^31 - 2.
[[nodiscard]] Expected<std::int32_t> count_of(const JsonNode& value);

}  // namespace tandem::grammar
