// chat_request.h — a chat request, read and rendered. Internal to api/.
#pragma once

#include <string>

#include "server/api/form_json.h"
#include "server/api/generation.h"
#include "text/chat.h"

namespace tandem::server {

struct ChatRequest {
  PromptPlan plan;
  StreamFields stream;
  bool wants_logprobs = false;
  bool separates_reasoning = true;
  bool returns_token_ids = false;
  bool returns_prompt_ids = false;
};

/// `body_text` is the JSON that `body` was parsed from: what reaches the prompt keeps its spelling.
[[nodiscard]] ChatRequest read_chat_request(const Service& service, const Json& body,
                                            const std::string& body_text, Problem& problem);
/// The conversation that a body with "messages" describes, ready to be rendered.
[[nodiscard]] Conversation read_conversation(const Service& service, const Json& body,
                                             const std::string& body_text, Problem& problem);
[[nodiscard]] std::vector<std::int32_t> render(const Service& service,
                                               const Conversation& conversation, Problem& problem);

}  // namespace tandem::server
