// The text layer on arbitrary bytes: round trips, specials off, streaming, and every parser of it.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/check.h"
#include "support/tiny_vocab.h"
#include "text/char_tokenizer.h"
#include "text/chat_template.h"
#include "text/kimi_tokenizer.h"
#include "text/stream_decoder.h"
#include "text/utf8.h"

namespace tandem {
namespace {

std::unique_ptr<KimiTokenizer> make_kimi() {
  const auto tokens = testing::tiny_vocab(
      {"aa", "aaa", "aaaa", "he", "llo", "hello", " a", "\xE4\xBD", "\xBD\xA0", "<|", "|>", "  "});
  BpeVocab vocab = BpeVocab::parse(testing::tiktoken_text(tokens), "tiny").value_or_throw();
  return KimiTokenizer::create(std::move(vocab), KimiTokenizer::k3_specials()).value_or_throw();
}

std::unique_ptr<CharTokenizer> make_char() {
  return CharTokenizer::create({.tokens = {"a", "b", "ab", "abcab", "c", "日", "日本", " "},
                                .special = {"<unk>", "<eos>"},
                                .stop = {"<eos>"}})
      .value_or_throw();
}

void check_tokenizers(std::string_view text) {
  static const auto kKimi = make_kimi();
  static const auto kChar = make_char();
  const auto ids = kKimi->encode(text);
  TDM_CHECK(kKimi->decode(ids) == text);
  StreamDecoder decoder(*kKimi);
  std::string streamed;
  for (const std::int32_t id : ids) {
    TDM_CHECK(id < kKimi->special_id("[BOS]").value(), id);
    streamed += decoder.push(id);
  }
  streamed += decoder.finish();
  TDM_CHECK(streamed == to_valid_utf8(text));
  const Segment segment{std::string(text), true};
  TDM_CHECK(kKimi->decode(kKimi->encode_segments({&segment, 1})) == text);
  const std::string known = kChar->decode(kChar->encode(text));
  TDM_CHECK(is_valid_utf8(known));

  std::string joined;
  for (const auto piece : cut_into_pieces(text, {.piece_chars = 7, .run_chars = 3})) {
    joined += piece;
  }
  TDM_CHECK(joined == text);
}

void check_parsers(std::string_view text) {
  if (const auto vocab = BpeVocab::parse(text, "fuzz")) {
    TDM_CHECK(vocab->size() >= 256);
  }
  const auto conversation = parse_conversation(text);
  if (conversation) {
    if (const auto segments = KimiTemplate().render(*conversation)) {
      for (const Segment& segment : *segments) {
        TDM_CHECK(!segment.text.empty());
      }
    }
    static_cast<void>(PlainTemplate("<eos>").render(*conversation));
  }
}

}  // namespace
}  // namespace tandem

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  tandem::check_tokenizers(text);
  tandem::check_parsers(text);
  return 0;
}
