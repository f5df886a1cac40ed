// Channels of a Kimi K3 turn, read token by token.
#include "cli/response_reader.h"

#include <gtest/gtest.h>

#include "text/char_tokenizer.h"

namespace tandem::cli {
namespace {

std::unique_ptr<CharTokenizer> tokenizer(std::vector<std::string> special) {
  CharTokenizer::Spec spec;
  for (char c = 'a'; c <= 'z'; ++c) {
    spec.tokens.emplace_back(1, c);
  }
  spec.tokens.emplace_back("\xC3\xA9");
  spec.special = std::move(special);
  spec.special.emplace_back(CharTokenizer::kUnknown);
  return CharTokenizer::create(std::move(spec)).value_or_throw();
}

struct Read {
  std::string shown;
  std::string content;
  std::string reasoning;
};

Read read(const Tokenizer& tokenizer, const std::string& text, bool thinking) {
  ResponseReader reader(tokenizer, thinking);
  Read result;
  const std::vector<Segment> segments{{text, true}};
  for (const std::int32_t id : tokenizer.encode_segments(segments)) {
    result.shown += reader.push(id);
  }
  result.shown += reader.finish();
  result.content = reader.content();
  result.reasoning = reader.reasoning();
  return result;
}

const std::vector<std::string> kMarkers{"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"};

TEST(ResponseReader, AModelWithoutMarkersHasOneChannel) {
  const auto plain = tokenizer({"<eos>"});
  const Read result = read(*plain, "hello<eos>", false);
  EXPECT_EQ(result.shown, "hello");
  EXPECT_EQ(result.content, "hello");
  EXPECT_EQ(read(*plain, "hello", true).content, "hello");
}

TEST(ResponseReader, ShowsTheResponseChannelOnly) {
  const auto k3 = tokenizer(kMarkers);
  const Read result = read(*k3,
                           "hello<|close|>response<|sep|><|open|>tools<|sep|>call<|close|>tools"
                           "<|sep|><|close|>message<|sep|><|end_of_msg|>",
                           false);
  EXPECT_EQ(result.shown, "hello");
  EXPECT_EQ(result.content, "hello");
  EXPECT_EQ(result.reasoning, "");
}

TEST(ResponseReader, KeepsTheReasoningApart) {
  const auto k3 = tokenizer(kMarkers);
  const Read result =
      read(*k3, "hmm<|close|>think<|sep|><|open|>response<|sep|>yes<|close|>response<|sep|>", true);
  EXPECT_EQ(result.shown, "yes");
  EXPECT_EQ(result.reasoning, "hmm");
}

TEST(ResponseReader, ATurnCutInAHeaderShowsNoHeader) {
  const auto k3 = tokenizer(kMarkers);
  EXPECT_EQ(read(*k3, "yes<|close|>resp", false).shown, "yes");
}

}  // namespace
}  // namespace tandem::cli
