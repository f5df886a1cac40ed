#include "server/load/endpoint.h"

#include <algorithm>
#include <utility>

#include "core/checked_cast.h"
#include "io/json_strict.h"

namespace tandem::load {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr int kMaxDepth = 64;

/// The member, unless it is missing or null or `object` is none.
const Json* member(const Json& object, const char* key) {
  if (!object.is_object()) {
    return nullptr;
  }
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::optional<std::int64_t> count(const Json& object, const char* key) {
  const Json* value = member(object, key);
  return value != nullptr && value->is_number_integer() && value->get<std::int64_t>() >= 0
             ? std::optional(value->get<std::int64_t>())
             : std::nullopt;
}

std::string_view text_of(const Json& object, const char* key) {
  const Json* value = member(object, key);
  return value != nullptr && value->is_string()
             ? std::string_view(value->get_ref<const std::string&>())
             : std::string_view();
}

/// A delta of chat: answer, reasoning (two names are in use) or arguments of a call.
bool delta_has_text(const Json& delta) {
  if (!text_of(delta, "content").empty() || !text_of(delta, "reasoning_content").empty() ||
      !text_of(delta, "reasoning").empty()) {
    return true;
  }
  const Json* calls = member(delta, "tool_calls");
  return calls != nullptr && !calls->empty();
}

/// The message of {"error": {"message": ...}}, {"error": "..."} or {"message": "..."}; else empty.
std::string message_in(const Json& json) {
  if (const Json* error = member(json, "error")) {
    const std::string_view message = text_of(*error, "message");
    return error->is_string() ? error->get<std::string>()
           : message.empty()  ? error->dump(-1, ' ', false, Json::error_handler_t::replace)
                              : std::string(message);
  }
  return std::string(text_of(json, "message"));
}

}  // namespace

Expected<Endpoint> parse_endpoint(std::string_view name) {
  if (name == "completions") {
    return Endpoint::kCompletions;
  }
  if (name == "chat") {
    return Endpoint::kChat;
  }
  if (name == "generate") {
    return Endpoint::kGenerate;
  }
  return fail("--endpoint '{}': expected completions, chat or generate", name);
}

std::string_view path_of(Endpoint endpoint) {
  switch (endpoint) {
    case Endpoint::kCompletions:
      return "/v1/completions";
    case Endpoint::kChat:
      return "/v1/chat/completions";
    case Endpoint::kGenerate:
      break;
  }
  return "/generate";
}

std::string request_body(const RequestForm& form, const Prompt& prompt, std::int64_t output_len) {
  OrderedJson body = OrderedJson::object();
  if (form.endpoint == Endpoint::kGenerate) {
    if (prompt.ids.empty()) {
      body["text"] = prompt.text;
    } else {
      body["input_ids"] = prompt.ids;
    }
    body["sampling_params"] = {{"max_new_tokens", output_len},
                               {"temperature", form.temperature},
                               {"ignore_eos", form.ignore_eos}};
    body["stream"] = true;
  } else {
    if (!form.model.empty()) {
      body["model"] = form.model;
    }
    if (form.endpoint == Endpoint::kChat) {
      OrderedJson messages = OrderedJson::array();
      for (const Message& message : prompt.messages) {
        messages.push_back({{"role", message.role}, {"content", message.content}});
      }
      body["messages"] = std::move(messages);
      body["max_completion_tokens"] = output_len;
    } else {
      body["prompt"] = prompt.ids.empty() ? OrderedJson(prompt.text) : OrderedJson(prompt.ids);
      body["max_tokens"] = output_len;
    }
    body["temperature"] = form.temperature;
    if (form.ignore_eos) {
      body["ignore_eos"] = true;
    }
    body["stream"] = true;
    body["stream_options"] = {{"include_usage", true}};
  }
  return body.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

double AnswerReader::push(std::string_view data) {
  if (data == "[DONE]") {
    return 0;
  }
  const auto event = detail::parse_json_strict(data, kMaxDepth);
  if (!event || !event->is_object()) {
    reject("bad_event", fmt::format("an event is no JSON object: {}",
                                    event ? detail::show_text(data) : event.message()));
    return 0;
  }
  if (member(*event, "error") != nullptr) {
    reject("error_event", message_in(*event));
    return 0;
  }
  return endpoint_ == Endpoint::kGenerate ? push_native(*event) : push_chunk(*event);
}

double AnswerReader::push_chunk(const Json& chunk) {
  if (const Json* usage = member(chunk, "usage")) {
    prompt_tokens_ = count(*usage, "prompt_tokens");
    output_tokens_ = count(*usage, "completion_tokens");
    if (const Json* details = member(*usage, "prompt_tokens_details")) {
      cached_tokens_ = count(*details, "cached_tokens");
    }
  }
  const Json* choices = member(chunk, "choices");
  if (choices == nullptr || !choices->is_array() || choices->empty()) {
    return 0;
  }
  const Json& choice = choices->front();
  const std::string_view reason = text_of(choice, "finish_reason");
  is_finished_ = is_finished_ || !reason.empty();
  if (reason == "abort") {
    reject("aborted", "the server ended the answer");
  }
  if (endpoint_ == Endpoint::kCompletions) {
    const std::string_view text = text_of(choice, "text");
    text_ += text;
    return text.empty() ? 0 : 1;
  }
  const Json* delta = member(choice, "delta");
  if (delta == nullptr || !delta_has_text(*delta)) {
    return 0;
  }
  text_ += text_of(*delta, "content");
  return 1;
}

double AnswerReader::push_native(const Json& event) {
  if (const Json* meta = member(event, "meta_info")) {
    prompt_tokens_ = count(*meta, "prompt_tokens");
    output_tokens_ = count(*meta, "completion_tokens");
    cached_tokens_ = count(*meta, "cached_tokens");
    if (const Json* reason = member(*meta, "finish_reason")) {
      is_finished_ = true;
      if (text_of(*reason, "type") == "abort") {
        const std::string_view why = text_of(*reason, "message");
        reject("aborted", why.empty() ? "the server ended the answer" : std::string(why));
      }
    }
  }
  read_native_ids(event);
  const std::string_view text = text_of(event, "text");
  const bool is_new = !text.empty() && (is_incremental_ || text != text_);
  if (is_incremental_) {
    text_ += text;
  } else {
    text_ = text;
  }
  if (!is_new) {
    return 0;
  }
  const std::int64_t before = tokens_with_text_;
  tokens_with_text_ = output_tokens_.value_or(before + 1);
  // Text that was held back may come at the end, without a token of its own.
  return static_cast<double>(std::max<std::int64_t>(1, tokens_with_text_ - before));
}

void AnswerReader::read_native_ids(const Json& event) {
  const Json* list = member(event, "output_ids");
  if (list == nullptr || !list->is_array()) {
    return;
  }
  std::vector<std::int32_t> ids;
  for (const Json& id : *list) {
    if (id.is_number_integer() && std::in_range<std::int32_t>(id.get<std::int64_t>())) {
      ids.push_back(id.get<std::int32_t>());
    }
  }
  is_incremental_ = is_incremental_ || (output_tokens_ && isize(*list) < *output_tokens_);
  if (is_incremental_) {
    ids_.insert(ids_.end(), ids.begin(), ids.end());
  } else {
    ids_ = std::move(ids);
  }
}

void AnswerReader::reject(std::string kind, std::string text) {
  if (!problem_) {
    problem_ = {std::move(kind), std::move(text)};
  }
}

std::string error_text(std::string_view body) {
  const auto json = detail::parse_json_strict(body, kMaxDepth);
  const std::string message = json ? message_in(*json) : std::string();
  if (!message.empty()) {
    return message;
  }
  return body.empty() ? "(no body)" : detail::show_text(body);
}

}  // namespace tandem::load
