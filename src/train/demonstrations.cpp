#include "train/demonstrations.h"

#include <algorithm>

#include "core/checked_cast.h"
#include "text/chat_template.h"

namespace tandem {
namespace {

Expected<std::vector<std::int32_t>> encode(const Tokenizer& tokenizer, const ChatTemplate& chat,
                                           const Conversation& conversation) {
  const auto segments = chat.render(conversation);
  if (!segments.ok()) {
    return segments.failure();
  }
  return tokenizer.encode_segments(*segments);
}

Conversation user_turn(const std::string& question) {
  Conversation conversation;
  conversation.thinking = false;
  conversation.effort.reset();
  ChatMessage& message = conversation.messages.emplace_back();
  message.role = ChatRole::kUser;
  message.content = {question};
  return conversation;
}

}  // namespace

Expected<std::vector<std::int32_t>> encode_prompt(const Tokenizer& tokenizer,
                                                  const std::string& question) {
  return encode(tokenizer, *make_chat_template(tokenizer), user_turn(question));
}

Expected<std::vector<EncodedDemonstration>> encode_demonstrations(
    const Tokenizer& tokenizer, std::span<const PromptRecord> records) {
  const auto chat = make_chat_template(tokenizer);
  std::vector<EncodedDemonstration> out;
  out.reserve(records.size());
  for (const PromptRecord& record : records) {
    Conversation conversation = user_turn(record.prompt);
    const auto prompt = encode(tokenizer, *chat, conversation);
    if (!prompt.ok()) {
      return fail("line {}: {}", record.line, prompt.message());
    }
    ChatMessage& answer = conversation.messages.emplace_back();
    answer.role = ChatRole::kAssistant;
    answer.content = {record.label};
    conversation.add_generation_prompt = false;
    auto whole = encode(tokenizer, *chat, conversation);
    if (!whole.ok()) {
      return fail("line {}: {}", record.line, whole.message());
    }
    if (prompt->empty() || whole->size() <= prompt->size() ||
        !std::equal(prompt->begin(), prompt->end(), whole->begin())) {
      return fail(
          "line {}: expected a question and an answer that render to more tokens than the question "
          "alone",
          record.line);
    }
    out.push_back({*std::move(whole), isize(*prompt)});
  }
  return out;
}

}  // namespace tandem
