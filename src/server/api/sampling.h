// sampling.h — the fields that all generating endpoints share, under the names of the OpenAI and
// of the native interface. Source: spec serving.md 1.4, 1.6, 3.1.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/api/fields.h"

namespace tandem::server {

/// What a checkpoint and its engine allow.
struct ModelLimits {
  std::int64_t vocab_size = 0;
  std::int64_t max_seq_len = 0;
};

enum class Endpoint { kCompletions, kChat, kGenerate };

struct GrammarSource {
  enum class Kind { kNone, kJsonObject, kJsonSchema, kRegex, kTools };
  Kind kind = Kind::kNone;
  std::string text = {};     // schema as JSON, pattern, or list of tools as JSON
  bool is_strict = false;    // of a schema: what it does not name is forbidden
  bool single_call = false;  // of tools: one call and no more
  std::string param = {};    // the field it came from

  friend auto operator<=>(const GrammarSource&, const GrammarSource&) = default;
};

struct Sampling {
  /// All but prompt, seed, sequence_id, max_new_tokens and constraint.
  Request request;
  std::optional<std::int64_t> max_new_tokens;  // none: to the end of the context
  std::optional<std::uint64_t> seed;           // none: a new one each time
  std::int64_t n = 1;
  std::vector<std::string> stop;
  bool keeps_stop = false;    // the text keeps the stop string or token that ended it
  bool skips_special = true;  // control tokens leave no text
  GrammarSource grammar = {};
};

/// Reads them from a request's body, or from "sampling_params" of the native one.
[[nodiscard]] Sampling read_sampling(const FieldReader& fields, Endpoint endpoint,
                                     const ModelLimits& limits);

/// max_new_tokens for a prompt of this length: clamped to what fits. A prompt that leaves no room
/// is context_length_exceeded.
[[nodiscard]] std::int64_t fit_to_context(const Sampling& sampling, std::int64_t prompt_size,
                                          const ModelLimits& limits, const std::string& param,
                                          Problem& problem);

}  // namespace tandem::server
