// json_schema.h — from a JSON schema to the rules of the texts that it allows.
#pragma once

#include <string_view>

#include "text/grammar.h"
#include "text/grammar/json_rules.h"
#include "text/json_text.h"

namespace tandem::grammar {

/// Adds the schema's rules to `rules` and defines rule 0. Where the schema leaves open how a value
/// is spelled or ordered, one way is chosen (docs/structured_output.md), so the texts are a subset
/// of the valid ones.
/// Errors: as compile_json_schema().
[[nodiscard]] Status add_schema_rules(const JsonNode& schema, SchemaDefaults defaults,
                                      JsonRules& rules);

}  // namespace tandem::grammar
