// Token streams as a model may write them: every token is counted once, text is UTF-8, markers
// never leak, calls come in order. Bytes 0xF0 and above are markers and headers, others are text.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/checked_cast.h"
#include "support/tiny_vocab.h"
#include "text/kimi_tokenizer.h"
#include "text/response_parser.h"
#include "text/utf8.h"

namespace tandem {
namespace {

const KimiTokenizer& kimi() {
  static const auto kTokenizer = [] {
    const auto tokens = testing::tiny_vocab({"think", "response", "tools", "call", "argument"});
    BpeVocab vocab = BpeVocab::parse(testing::tiktoken_text(tokens), "tiny").value_or_throw();
    return KimiTokenizer::create(std::move(vocab), KimiTokenizer::k3_specials()).value_or_throw();
  }();
  return *kTokenizer;
}

std::vector<std::int32_t> ids_of(std::string_view input) {
  constexpr std::array<std::string_view, 16> kWords = {"<|open|>",
                                                       "<|close|>",
                                                       "<|sep|>",
                                                       "<|end_of_msg|>",
                                                       "[BOS]",
                                                       "think",
                                                       "response",
                                                       "tools",
                                                       "call",
                                                       "json",
                                                       "message",
                                                       "call tool=\"f\" index=\"1\"",
                                                       "argument",
                                                       "\xE4",
                                                       "argument key=\"a\" type=\"string\"",
                                                       "argument key=\"b\" type=\"object\""};
  std::vector<std::int32_t> ids;
  for (const char c : input) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0xF0) {
      ids.push_back(testing::byte_id(c));
      continue;
    }
    const std::string word(kWords[byte - 0xF0U]);
    if (const auto special = kimi().special_id(word)) {
      ids.push_back(*special);
    } else {
      const auto encoded = kimi().encode(word);
      ids.insert(ids.end(), encoded.begin(), encoded.end());
    }
  }
  return ids;
}

// Checks pieces as they come.
class Watcher {
 public:
  void see(const std::vector<ResponsePiece>& pieces) {
    for (const ResponsePiece& piece : pieces) {
      TDM_CHECK(is_valid_utf8(piece.text), piece.text);
      TDM_CHECK(piece.num_tokens >= 0, piece.num_tokens);
      num_tokens_ += piece.num_tokens;
      TDM_CHECK(piece.channel != Channel::kMarkup || piece.text.empty(), piece.text);
      if (piece.channel == Channel::kToolCall) {
        see_call(piece);
      }
    }
  }
  [[nodiscard]] std::int64_t num_tokens() const { return num_tokens_; }
  [[nodiscard]] std::int64_t num_complete() const { return num_complete_; }

 private:
  void see_call(const ResponsePiece& piece) {
    num_calls_ += piece.call_name.empty() ? 0 : 1;
    TDM_CHECK(piece.call_index == num_calls_ - 1, piece.call_index, num_calls_);
    TDM_CHECK(num_complete_ < num_calls_, num_calls_);
    num_complete_ += piece.call_complete ? 1 : 0;
  }

  std::int64_t num_tokens_ = 0;
  std::int64_t num_calls_ = 0;
  std::int64_t num_complete_ = 0;
};

void check_response(std::string_view input) {
  if (input.empty()) {
    return;
  }
  const auto ids = ids_of(input.substr(1));
  const auto parser = make_response_parser(kimi(), input[0] % 2 == 0);
  Watcher watcher;
  for (const std::int32_t id : ids) {
    watcher.see(parser->push(id));
    static_cast<void>(parser->channel());
  }
  watcher.see(parser->finish());
  TDM_CHECK(watcher.num_tokens() == isize(ids), watcher.num_tokens(), isize(ids));
  TDM_CHECK(watcher.num_complete() == parser->num_complete_calls(), watcher.num_complete());
}

}  // namespace
}  // namespace tandem

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tandem::check_response(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
