#include "server/api/chat.h"

#include <utility>

#include "server/api/chat_request.h"
#include "text/utf8.h"

namespace tandem::server {
namespace {

OrderedJson logprob_entry(const Tokenizer& tokenizer, std::int32_t id, float logprob) {
  const std::string_view bytes = tokenizer.token_bytes(id);
  OrderedJson list = OrderedJson::array();
  for (const char c : bytes) {
    list.push_back(static_cast<unsigned char>(c));
  }
  return {{"token", to_valid_utf8(bytes)},
          {"logprob", json_logprob(logprob)},
          {"bytes", std::move(list)}};
}

OrderedJson logprob_list(const Tokenizer& tokenizer, const std::vector<TokenEntry>& entries) {
  OrderedJson list = OrderedJson::array();
  for (const TokenEntry& token : entries) {
    OrderedJson entry = logprob_entry(tokenizer, token.id, token.logprob);
    OrderedJson top = OrderedJson::array();
    for (const TokenLogprob& other : token.top) {
      top.push_back(logprob_entry(tokenizer, other.token, other.logprob));
    }
    entry["top_logprobs"] = std::move(top);
    list.push_back(std::move(entry));
  }
  return list;
}

class ChatForm final : public ResponseForm {
 public:
  explicit ChatForm(const ChatRequest& request)
      : stream_(request.stream),
        wants_logprobs_(request.wants_logprobs),
        separates_reasoning_(request.separates_reasoning),
        returns_token_ids_(request.returns_token_ids),
        returns_prompt_ids_(request.returns_prompt_ids) {}

  [[nodiscard]] std::string whole(const GenerationState& state) override;
  void begin(const GenerationState& state, const Send& send) override;
  void advance(const GenerationState& state, const Sample& sample, const Delta& delta,
               const Send& send) override;
  void end(const GenerationState& state, const Send& send) override;

 private:
  [[nodiscard]] OrderedJson message_of(const Sample& sample) const;
  [[nodiscard]] OrderedJson choice_of(const GenerationState& state, const Sample& sample) const;
  [[nodiscard]] OrderedJson logprobs_of(const Tokenizer& tokenizer, const Delta& delta) const;
  [[nodiscard]] static std::string finish_reason_of(const Sample& sample);
  /// `content_delta` with what every chunk has.
  void send_chunk(const GenerationState& state, const Sample& sample, OrderedJson choice_fields,
                  const Send& send);
  [[nodiscard]] std::vector<std::int32_t> take_ids(const Sample& sample);

  StreamFields stream_;
  bool wants_logprobs_;
  bool separates_reasoning_;
  bool returns_token_ids_;
  bool returns_prompt_ids_;
  std::vector<std::size_t> ids_sent_;  // by sample
};

std::string ChatForm::finish_reason_of(const Sample& sample) {
  const bool has_calls = sample.text.num_complete_calls() > 0;
  return sample.finish_reason == "stop" && has_calls ? "tool_calls" : sample.finish_reason;
}

OrderedJson ChatForm::logprobs_of(const Tokenizer& tokenizer, const Delta& delta) const {
  if (!wants_logprobs_) {
    return nullptr;
  }
  OrderedJson logprobs{{"content", logprob_list(tokenizer, delta.content_tokens)},
                       {"refusal", nullptr}};
  if (!delta.reasoning_tokens.empty()) {
    logprobs["reasoning_content"] = logprob_list(tokenizer, delta.reasoning_tokens);
  }
  return logprobs;
}

OrderedJson ChatForm::message_of(const Sample& sample) const {
  const Delta& total = sample.total;
  OrderedJson calls = OrderedJson::array();
  for (const ToolDelta& tool : total.tools) {
    if (!tool.name.empty()) {
      calls.push_back({{"id", tool.id},
                       {"type", "function"},
                       {"function", {{"name", tool.name}, {"arguments", ""}}}});
    }
    if (!calls.empty()) {
      auto& arguments = calls.back()["function"]["arguments"].get_ref<std::string&>();
      arguments += tool.arguments;
    }
  }
  const std::string content =
      separates_reasoning_ ? total.content : total.reasoning + total.content;
  OrderedJson message{{"role", "assistant"}};
  message["content"] =
      content.empty() && !calls.empty() ? OrderedJson(nullptr) : OrderedJson(content);
  message["reasoning_content"] = separates_reasoning_ && !total.reasoning.empty()
                                     ? OrderedJson(total.reasoning)
                                     : OrderedJson(nullptr);
  message["tool_calls"] = calls.empty() ? OrderedJson(nullptr) : std::move(calls);
  message["refusal"] = nullptr;
  return message;
}

OrderedJson ChatForm::choice_of(const GenerationState& state, const Sample& sample) const {
  OrderedJson choice{{"index", sample.index},
                     {"message", message_of(sample)},
                     {"logprobs", logprobs_of(state.service.tokenizer, sample.total)},
                     {"finish_reason", finish_reason_of(sample)},
                     {"matched_stop", matched_stop(sample)}};
  if (returns_token_ids_) {
    choice["token_ids"] = sample.total.ids;
  }
  return choice;
}

std::string ChatForm::whole(const GenerationState& state) {
  OrderedJson answer = answer_head(state, "chat.completion");
  OrderedJson choices = OrderedJson::array();
  for (const Sample& sample : state.samples) {
    choices.push_back(choice_of(state, sample));
  }
  answer["choices"] = std::move(choices);
  answer["usage"] = usage_json(state);
  if (returns_prompt_ids_) {
    answer["prompt_token_ids"] = state.plan.prompts.front().ids;
  }
  add_version(answer, state);
  return to_line(answer);
}

void ChatForm::begin(const GenerationState& state, const Send& send) {
  ids_sent_.assign(state.samples.size(), 0);
  for (const Sample& sample : state.samples) {
    OrderedJson chunk = answer_head(state, "chat.completion.chunk");
    chunk["choices"] = {{{"index", sample.index},
                         {"delta", {{"role", "assistant"}, {"content", ""}}},
                         {"logprobs", nullptr},
                         {"finish_reason", nullptr}}};
    if (returns_prompt_ids_ && sample.index == 0) {
      chunk["prompt_token_ids"] = state.plan.prompts.front().ids;
    }
    if (stream_.include_usage) {
      chunk["usage"] = nullptr;
    }
    send(to_line(chunk));
  }
}

std::vector<std::int32_t> ChatForm::take_ids(const Sample& sample) {
  std::size_t& sent = ids_sent_[static_cast<std::size_t>(sample.index)];
  std::vector<std::int32_t> ids(sample.total.ids.begin() + static_cast<std::ptrdiff_t>(sent),
                                sample.total.ids.end());
  sent = sample.total.ids.size();
  return ids;
}

void ChatForm::send_chunk(const GenerationState& state, const Sample& sample,
                          OrderedJson choice_fields, const Send& send) {
  OrderedJson choice{{"index", sample.index}};
  choice.update(choice_fields);
  if (returns_token_ids_) {
    choice["token_ids"] = take_ids(sample);
  }
  send(choice_event(state, "chat.completion.chunk", stream_, std::move(choice)));
}

void ChatForm::advance(const GenerationState& state, const Sample& sample, const Delta& delta,
                       const Send& send) {
  const Tokenizer& tokenizer = state.service.tokenizer;
  const auto send_delta = [&](OrderedJson content, const Delta& logprobs) {
    send_chunk(state, sample,
               {{"delta", std::move(content)},
                {"logprobs", logprobs_of(tokenizer, logprobs)},
                {"finish_reason", nullptr}},
               send);
  };
  if (!delta.reasoning.empty() || (wants_logprobs_ && !delta.reasoning_tokens.empty())) {
    Delta part;
    part.reasoning_tokens = delta.reasoning_tokens;
    send_delta({{separates_reasoning_ ? "reasoning_content" : "content", delta.reasoning}}, part);
  }
  if (!delta.content.empty() || (wants_logprobs_ && !delta.content_tokens.empty())) {
    Delta part;
    part.content_tokens = delta.content_tokens;
    send_delta({{"content", delta.content}}, part);
  }
  for (const ToolDelta& tool : delta.tools) {
    OrderedJson call{{"index", tool.index}};
    if (!tool.name.empty()) {
      call["id"] = tool.id;
      call["type"] = "function";
      call["function"]["name"] = tool.name;
    }
    call["function"]["arguments"] = tool.arguments;
    send_delta({{"tool_calls", OrderedJson::array({std::move(call)})}}, {});
  }
  if (sample.is_finished) {
    send_chunk(state, sample,
               {{"delta", OrderedJson::object()},
                {"logprobs", nullptr},
                {"finish_reason", finish_reason_of(sample)},
                {"matched_stop", matched_stop(sample)}},
               send);
  }
}

void ChatForm::end(const GenerationState& state, const Send& send) {
  if (stream_.include_usage) {
    send(usage_event(state, "chat.completion.chunk"));
  }
}

}  // namespace

std::vector<std::int32_t> encode_chat(const Service& service, const Json& body,
                                      const std::string& body_text, Problem& problem) {
  const Conversation conversation = read_conversation(service, body, body_text, problem);
  return problem ? std::vector<std::int32_t>() : render(service, conversation, problem);
}

void handle_chat(Service& service, const std::shared_ptr<Exchange>& exchange) {
  Problem problem;
  const Json body = parse_body(exchange->request(), false, problem);
  ChatRequest request;
  if (!problem) {
    request = read_chat_request(service, body, exchange->request().body, problem);
  }
  if (problem) {
    exchange->respond(error_response(problem.error()));
    return;
  }
  auto form = std::make_unique<ChatForm>(request);
  GenerationPlan plan{{}, request.stream.stream};
  plan.prompts.push_back(std::move(request.plan));
  std::make_shared<Generation>(service, exchange, std::move(form), std::move(plan),
                               "chatcmpl-" + random_id())
      ->start();
}

}  // namespace tandem::server
