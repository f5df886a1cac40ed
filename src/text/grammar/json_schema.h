// json_schema.h — from a JSON schema to the rules of the texts that it allows.
#pragma once

#include "text/grammar.h"
#include "text/grammar/json_rules.h"
#include "text/grammar/schema_facts.h"
#include "text/grammar/schema_index.h"
#include "text/json_text.h"

namespace tandem::grammar {

/// Adds the rules of the schemas' values to `rules` and defines rule 0 as one value. Where schemas
/// leave open how a value is spelled or ordered, one way is chosen (docs/structured_output.md), so
/// the texts are a subset of the valid ones.
/// Errors: as compile_json_schema().
[[nodiscard]] Status add_value_rules(const SchemaIndex& index, const SchemaSet& schemas,
                                     SchemaDefaults defaults, JsonRules& rules);

/// The same for the characters of a string, without quotes and escapes; other values are left out.
[[nodiscard]] Status add_plain_string_rules(const SchemaIndex& index, const SchemaSet& schemas,
                                            JsonRules& rules);

/// The properties of the objects that a schema describes. Errors: a Failure when it leaves none, or
/// has alternatives.
[[nodiscard]] Expected<ObjectFacts> object_of(const SchemaIndex& index, const JsonNode& schema,
                                              SchemaDefaults defaults, JsonRules& rules);

}  // namespace tandem::grammar
