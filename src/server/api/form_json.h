// form_json.h — pieces of JSON that several answers share.
#pragma once

#include <string>

#include "server/api/generation.h"

namespace tandem::server {

/// The text of a token on its own, invalid bytes as U+FFFD.
[[nodiscard]] std::string token_text(const Tokenizer& tokenizer, std::int32_t id);
/// Natural log; JSON has no -inf, so anything below -9999 is that.
[[nodiscard]] double json_logprob(float logprob);
/// The stop token's id, the stop string, or null.
[[nodiscard]] OrderedJson matched_stop(const Sample& sample);

/// What a request asked about its stream.
struct StreamFields {
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
};
[[nodiscard]] StreamFields read_stream_fields(const FieldReader& fields);

/// {"id", "object", "created", "model"}, with which all answers of /v1/ begin.
[[nodiscard]] OrderedJson answer_head(const GenerationState& state, const std::string& object);
/// One event of a stream of /v1/ with one choice, and with the usage it asked for.
[[nodiscard]] std::string choice_event(const GenerationState& state, const std::string& object,
                                       const StreamFields& stream, OrderedJson choice);
/// The event without a choice that ends a stream which asked for its usage.
[[nodiscard]] std::string usage_event(const GenerationState& state, const std::string& object);
/// "metadata" and "system_fingerprint".
void add_version(OrderedJson& answer, const GenerationState& state);

}  // namespace tandem::server
