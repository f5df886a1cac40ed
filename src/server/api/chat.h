// chat.h — POST /v1/chat/completions. Source: spec serving.md 1.5.
#pragma once

#include <memory>

#include "server/api/service.h"
#include "server/http/exchange.h"

namespace tandem::server {

void handle_chat(Service& service, const std::shared_ptr<Exchange>& exchange);

/// The prompt's ids for a body with "messages", as the chat endpoint makes them.
[[nodiscard]] std::vector<std::int32_t> encode_chat(const Service& service, const Json& body,
                                                    const std::string& body_text, Problem& problem);

}  // namespace tandem::server
