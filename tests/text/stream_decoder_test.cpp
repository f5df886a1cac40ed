#include "text/stream_decoder.h"

#include <gtest/gtest.h>

#include "core/rng.h"
#include "support/tiny_vocab.h"
#include "text/kimi_tokenizer.h"
#include "text/utf8.h"

namespace tandem {
namespace {

std::unique_ptr<KimiTokenizer> make() {
  const auto tokens = testing::tiny_vocab({"\xF0\x9F", "a\xE4", "\xBD\xA0z"});
  BpeVocab vocab = BpeVocab::parse(testing::tiktoken_text(tokens), "t").value_or_throw();
  return KimiTokenizer::create(std::move(vocab), KimiTokenizer::k3_specials()).value_or_throw();
}

TEST(StreamDecoder, HoldsBackUnfinishedCharacters) {
  const auto tokenizer = make();
  StreamDecoder decoder(*tokenizer);
  EXPECT_EQ(decoder.push(257), "a");  // a, and the first byte of 你
  EXPECT_EQ(decoder.push(258), "你z");
  EXPECT_EQ(decoder.push(256), "");
  EXPECT_EQ(decoder.push(testing::byte_id('\x8E')), "");
  EXPECT_EQ(decoder.push(testing::byte_id('\x89')), "\U0001F389");
  EXPECT_EQ(decoder.finish(), "");
}

TEST(StreamDecoder, BadBytesDoNotBlockTheStream) {
  const auto tokenizer = make();
  StreamDecoder decoder(*tokenizer);
  EXPECT_EQ(decoder.push(testing::byte_id('\xFF')), "\uFFFD");
  EXPECT_EQ(decoder.push(256), "");
  EXPECT_EQ(decoder.push(testing::byte_id('x')), "\uFFFDx");
  EXPECT_EQ(decoder.push(256), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(decoder.finish(), "");
  EXPECT_EQ(decoder.push(testing::byte_id('y')), "y");
}

TEST(StreamDecoder, ControlTokensAreSkippedOrShown) {
  const auto tokenizer = make();
  const std::int32_t end = tokenizer->special_id("<|end_of_msg|>").value();
  const std::int32_t close = tokenizer->special_id("<|close|>").value();
  StreamDecoder skipping(*tokenizer);
  EXPECT_EQ(skipping.push(end), "");
  EXPECT_EQ(skipping.push(close), "<|close|>");
  StreamDecoder keeping(*tokenizer, SpecialText::kKeep);
  EXPECT_EQ(keeping.push(end), "<|end_of_msg|>");
}

TEST(StreamDecoder, EqualsTheWholeTextRepaired) {
  const auto tokenizer = make();
  Rng rng(4);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::int32_t> ids;
    const std::uint64_t length = rng.below(12);
    for (std::uint64_t i = 0; i < length; ++i) {
      ids.push_back(static_cast<std::int32_t>(rng.below(rng.below(2) == 0 ? 128 : 259)));
    }
    StreamDecoder decoder(*tokenizer);
    std::string text;
    for (const std::int32_t id : ids) {
      const std::string part = decoder.push(id);
      ASSERT_TRUE(is_valid_utf8(part));
      text += part;
    }
    text += decoder.finish();
    ASSERT_EQ(text, to_valid_utf8(tokenizer->decode(ids)));
  }
}

}  // namespace
}  // namespace tandem
