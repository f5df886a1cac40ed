// chat_template.h — from a conversation to prompt segments. The renderers write the markers; every
// piece that came from outside stands in a segment of its own without special tokens.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "text/chat.h"
#include "text/tokenizer.h"

namespace tandem {

class ChatTemplate {
 public:
  virtual ~ChatTemplate() = default;

  /// The prompt, for Tokenizer::encode_segments().
  /// Errors: a Failure naming the message and field.
  [[nodiscard]] virtual Expected<std::vector<Segment>> render(
      const Conversation& conversation) const = 0;
};

/// Kimi K3's format: elements of <|open|>, <|close|> and <|sep|>, in the fixed order of its
/// renderer.
class KimiTemplate final : public ChatTemplate {
 public:
  [[nodiscard]] Expected<std::vector<Segment>> render(
      const Conversation& conversation) const override;
};

/// For base models and the demo: each system and user message is its text and a newline, each
/// assistant message its text and the stop token. Tools and response formats are Failures; thinking
/// and effort mean nothing here.
class PlainTemplate final : public ChatTemplate {
 public:
  /// `stop` is the special token's spelling; empty: a newline instead.
  explicit PlainTemplate(std::string stop) : stop_(std::move(stop)) {}
  [[nodiscard]] Expected<std::vector<Segment>> render(
      const Conversation& conversation) const override;

 private:
  std::string stop_;
};

/// KimiTemplate when the tokenizer has K3's markers, else PlainTemplate with its first stop token.
[[nodiscard]] std::unique_ptr<ChatTemplate> make_chat_template(const Tokenizer& tokenizer);

}  // namespace tandem
