// stream_decoder.h — text from ids as they arrive. A character may be split over tokens, so bytes
// of an unfinished character (at most 3) wait for the next token; what comes out is always UTF-8.
#pragma once

#include <cstdint>
#include <string>

#include "text/tokenizer.h"

namespace tandem {

class StreamDecoder {
 public:
  /// `tokenizer` must outlive the decoder.
  explicit StreamDecoder(const Tokenizer& tokenizer, SpecialText special = SpecialText::kSkip)
      : tokenizer_(&tokenizer), special_(special) {}

  /// The text that `id` completes; may be empty. Bytes that can no longer become a character give
  /// U+FFFD at once, so bad bytes never block the stream.
  [[nodiscard]] std::string push(std::int32_t id);

  /// The end of the stream: an unfinished character becomes U+FFFD. The decoder can be used again.
  [[nodiscard]] std::string finish();

  /// The last id's bytes end inside a character.
  [[nodiscard]] bool has_pending() const { return !pending_.empty(); }

 private:
  const Tokenizer* tokenizer_;
  SpecialText special_;
  std::string pending_;  // a well-formed but unfinished character, 0..3 bytes
};

}  // namespace tandem
