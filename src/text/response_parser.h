// response_parser.h — what a model generates, cut into its channels as it arrives: reasoning,
// answer, tool calls. Works on token ids, so that text which looks like a marker is text. Never
// throws on what a model writes: deviations of spec kimi-k3.md section 9 and serving.md section 6
// (rows 36 to 46) are tolerated.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "text/chat.h"
#include "text/tokenizer.h"

namespace tandem {

enum class Channel { kReasoning, kAnswer, kToolCall, kMarkup };

/// A piece of a response. Concatenated pieces of one channel are that channel's text.
struct ResponsePiece {
  Channel channel = Channel::kAnswer;
  std::string text;             ///< UTF-8; for kToolCall the next part of the call's JSON arguments
  std::int64_t call_index = 0;  ///< kToolCall: counts calls from 0
  std::string call_name;        ///< kToolCall: set in the first piece of a call only
  bool call_complete = false;   ///< kToolCall: the last piece of a call
  std::int64_t num_tokens = 0;  ///< tokens whose text ends in this piece, in order
};

class ResponseParser {
 public:
  virtual ~ResponseParser() = default;
  [[nodiscard]] virtual std::vector<ResponsePiece> push(std::int32_t id) = 0;
  /// The end of the response: what was held back. An unfinished call stays incomplete.
  [[nodiscard]] virtual std::vector<ResponsePiece> finish() = 0;
  /// The channel the next token falls into.
  [[nodiscard]] virtual Channel channel() const = 0;
  [[nodiscard]] virtual std::int64_t num_reasoning_tokens() const = 0;
  [[nodiscard]] virtual std::int64_t num_complete_calls() const = 0;
};

/// The parser of a conversation's answer: K3's markers when the tokenizer has them, else plain text
/// (all of it answer). `thinking`: the generation prompt opened the think channel.
[[nodiscard]] std::unique_ptr<ResponseParser> make_response_parser(const Tokenizer& tokenizer,
                                                                   bool thinking);

}  // namespace tandem
