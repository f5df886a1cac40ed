#include "server/api/form_json.h"

#include <algorithm>
#include <utility>

#include "text/utf8.h"

namespace tandem::server {

std::string token_text(const Tokenizer& tokenizer, std::int32_t id) {
  return to_valid_utf8(tokenizer.token_bytes(id));
}

double json_logprob(float logprob) {
  return std::max(static_cast<double>(logprob), -9999.0);
}

OrderedJson matched_stop(const Sample& sample) {
  if (sample.text.is_stopped()) {
    return sample.text.stop_string();
  }
  return sample.stop_token ? OrderedJson(*sample.stop_token) : OrderedJson(nullptr);
}

StreamFields read_stream_fields(const FieldReader& fields) {
  StreamFields result;
  result.stream = fields.boolean("stream", false);
  if (const Json* options = fields.object("stream_options")) {
    const FieldReader inner(*options, fields.problem(), "stream_options.");
    result.include_usage = inner.boolean("include_usage", false);
    result.continuous_usage = inner.boolean("continuous_usage_stats", false);
    if (!result.stream) {
      fields.reject("stream_options", "stream_options needs stream: true");
    }
  }
  return result;
}

OrderedJson answer_head(const GenerationState& state, const std::string& object) {
  return {{"id", state.id},
          {"object", object},
          {"created", state.created},
          {"model", state.service.options.served_name}};
}

std::string choice_event(const GenerationState& state, const std::string& object,
                         const StreamFields& stream, OrderedJson choice) {
  OrderedJson chunk = answer_head(state, object);
  chunk["choices"] = OrderedJson::array({std::move(choice)});
  if (stream.continuous_usage) {
    chunk["usage"] = usage_json(state);
  } else if (stream.include_usage) {
    chunk["usage"] = nullptr;
  }
  return to_line(chunk);
}

std::string usage_event(const GenerationState& state, const std::string& object) {
  OrderedJson chunk = answer_head(state, object);
  chunk["choices"] = OrderedJson::array();
  chunk["usage"] = usage_json(state);
  add_version(chunk, state);
  return to_line(chunk);
}

void add_version(OrderedJson& answer, const GenerationState& state) {
  const std::string label = weight_version_of(state, state.samples.back());
  answer["system_fingerprint"] = "tandem-" + state.service.options.version + "-" + label;
  answer["metadata"] = {{"weight_version", label}};
}

}  // namespace tandem::server
