// grammar.h — JSON schemas and regular expressions as token masks: compiled once into a pushdown
// automaton over bytes, then walked down the trie of the vocabulary's tokens for each mask.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "text/token_constraint.h"
#include "text/tokenizer.h"

namespace tandem {

/// The ordinary tokens of a vocabulary as a trie of their bytes. Immutable; one per tokenizer.
class TokenTrie;
/// Takes the time of a sort of the vocabulary (K3: about 0.1 s).
[[nodiscard]] std::shared_ptr<const TokenTrie> make_token_trie(const Tokenizer& tokenizer);

struct GrammarLimits {
  std::int64_t max_source_bytes = 256 * 1024;
  std::int64_t max_states = 200'000;  ///< of all automata on the way, so of time and memory too
  std::int64_t max_depth = 64;        ///< of schemas in each other, of groups in a regex
  double max_compile_s = 10;
};

/// A compiled grammar: immutable, shared by any number of responses and threads.
class Grammar {
 public:
  virtual ~Grammar() = default;
  /// A matcher at the grammar's start. `stop_ids` may come where the text may end. Ids of special
  /// tokens never stand inside the text.
  [[nodiscard]] virtual std::unique_ptr<TokenConstraint> make_constraint(
      std::shared_ptr<const TokenTrie> trie, std::vector<std::int32_t> stop_ids) const = 0;
};

/// What an object without "additionalProperties" allows besides its properties.
enum class SchemaDefaults {
  kOpen,    ///< anything, as JSON schema says
  kClosed,  ///< nothing: "strict" of the OpenAI API
};

/// Supported keywords and choices: docs/structured_output.md.
/// Errors: a Failure naming the place in the schema (a JSON pointer) and what is not supported or
/// wrong.
[[nodiscard]] Expected<std::shared_ptr<const Grammar>> compile_json_schema(
    std::string_view schema_json, const GrammarLimits& limits = {},
    SchemaDefaults defaults = SchemaDefaults::kOpen);
/// Any JSON object.
[[nodiscard]] Expected<std::shared_ptr<const Grammar>> compile_json_object(
    const GrammarLimits& limits = {});
/// The whole text must match. Errors: a Failure naming the byte and what was expected.
[[nodiscard]] Expected<std::shared_ptr<const Grammar>> compile_regex(
    std::string_view pattern, const GrammarLimits& limits = {});

}  // namespace tandem
