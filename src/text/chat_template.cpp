#include "text/chat_template.h"

#include <algorithm>
#include <utility>

namespace tandem {

Expected<std::vector<Segment>> PlainTemplate::render(const Conversation& conversation) const {
  if (!conversation.tools_json.empty() || conversation.tool_choice == ToolChoice::kRequired) {
    return fail("tools: this model has no tool format");
  }
  if (conversation.response_format != ResponseFormat::kText) {
    return fail("response_format: this model has no JSON format");
  }
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < conversation.messages.size(); ++i) {
    const ChatMessage& message = conversation.messages[i];
    if (message.role == ChatRole::kTool || !message.tool_calls.empty() ||
        !message.tools_json.empty()) {
      return fail("messages[{}]: this model has no tool format", i);
    }
    std::string text;
    for (const std::string& part : message.content) {
      text += part;
    }
    const bool with_stop = message.role == ChatRole::kAssistant && !stop_.empty();
    if (!with_stop) {
      text += '\n';
    }
    // One segment with its newline: that is how training texts are encoded.
    if (!text.empty()) {
      segments.push_back({std::move(text), false});
    }
    if (with_stop) {
      segments.push_back({stop_, true});
    }
  }
  return segments;
}

std::unique_ptr<ChatTemplate> make_chat_template(const Tokenizer& tokenizer) {
  const auto known = [&](const char* token) { return tokenizer.special_id(token).has_value(); };
  if (known("<|open|>") && known("<|close|>") && known("<|sep|>") && known("<|end_of_msg|>")) {
    return std::make_unique<KimiTemplate>();
  }
  const auto stops = tokenizer.stop_ids();
  return std::make_unique<PlainTemplate>(
      stops.empty() ? std::string() : std::string(tokenizer.token_bytes(stops.front())));
}

}  // namespace tandem
