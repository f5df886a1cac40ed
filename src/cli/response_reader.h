// response_reader.h — what people should see of a response, from its token ids as they arrive.
//
// A Kimi K3 turn has channels: reasoning, <|close|>think<|sep|>, <|open|>response<|sep|>, text,
// <|close|>response<|sep|>, ... Models without these markers have one channel, the text itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "text/stream_decoder.h"
#include "text/tokenizer.h"

namespace tandem::cli {

class ResponseReader {
 public:
  /// `tokenizer` outlives the reader. `thinking`: the prompt ended by opening the think channel.
  ResponseReader(const Tokenizer& tokenizer, bool thinking);

  /// The answer's text that `id` completes; may be empty.
  std::string push(std::int32_t id);
  /// The end of the response: an unfinished character becomes U+FFFD.
  std::string finish();

  [[nodiscard]] const std::string& content() const { return content_; }
  [[nodiscard]] const std::string& reasoning() const { return reasoning_; }

 private:
  enum class Channel { kContent, kReasoning, kOther };
  std::string add(const std::string& text);

  StreamDecoder decoder_;
  std::optional<std::int32_t> open_;
  std::optional<std::int32_t> close_;
  std::optional<std::int32_t> sep_;
  Channel channel_;
  bool in_header_ = false;   // between <|open|> or <|close|> and <|sep|>
  bool is_opening_ = false;  // the header began with <|open|>
  std::string header_;
  std::string content_;
  std::string reasoning_;
};

}  // namespace tandem::cli
