#include "text/bpe_vocab.h"

#include <algorithm>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/rng.h"
#include "support/tiny_vocab.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

BpeVocab make(const std::vector<std::string>& tokens) {
  return BpeVocab::parse(testing::tiktoken_text(tokens), "t").value_or_throw();
}

std::vector<std::int32_t> merged(const BpeVocab& vocab, std::string_view text) {
  std::vector<std::int32_t> ids;
  vocab.append_merged(ids, text);
  return ids;
}

// The definition: while some neighbours join to a token, join the lowest-ranked, leftmost pair.
std::vector<std::int32_t> merged_oracle(const std::vector<std::string>& tokens,
                                        const std::string& text) {
  std::map<std::string, std::int32_t> ranks;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    ranks[tokens[i]] = static_cast<std::int32_t>(i);
  }
  if (ranks.contains(text)) {
    return {ranks[text]};
  }
  std::vector<std::string> parts;
  for (const char c : text) {
    parts.emplace_back(1, c);
  }
  while (true) {
    std::size_t best = parts.size();
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto rank = ranks.find(parts[i] + parts[i + 1]);
      if (rank != ranks.end() &&
          (best == parts.size() || rank->second < ranks[parts[best] + parts[best + 1]])) {
        best = i;
      }
    }
    if (best == parts.size()) {
      break;
    }
    parts[best] += parts[best + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  std::vector<std::int32_t> ids;
  for (const std::string& part : parts) {
    ids.push_back(ranks[part]);
  }
  return ids;
}

TEST(BpeVocab, LowestRankMergesFirstNotLongestOrLeftmost) {
  const BpeVocab vocab = make(testing::tiny_vocab({"bc", "ab", "abc", "cd"}));
  EXPECT_THAT(merged(vocab, "ab"), ElementsAre(257));
  EXPECT_THAT(merged(vocab, "abc"), ElementsAre(258));  // the whole is a token
  // bc first (256), then a + bc = abc; "ab" would have come first from the left.
  EXPECT_THAT(merged(vocab, "abcd"), ElementsAre(258, testing::byte_id('d')));
  EXPECT_THAT(merged(vocab, "cdx"), ElementsAre(259, testing::byte_id('x')));
}

TEST(BpeVocab, WholePreTokenIsATokenEvenIfMergesDoNotReachIt) {
  const BpeVocab vocab = make(testing::tiny_vocab({"xyz"}));
  EXPECT_THAT(merged(vocab, "xyz"), ElementsAre(256));
  EXPECT_THAT(merged(vocab, "xyzx"), ElementsAre(testing::byte_id('x'), testing::byte_id('y'),
                                                 testing::byte_id('z'), testing::byte_id('x')));
}

TEST(BpeVocab, EqualPairsMergeFromTheLeft) {
  const BpeVocab vocab = make(testing::tiny_vocab({"aa"}));
  EXPECT_THAT(merged(vocab, "aaa"), ElementsAre(256, testing::byte_id('a')));
}

TEST(BpeVocab, EmptyTextHasNoIds) {
  EXPECT_TRUE(merged(make(testing::tiny_vocab({})), "").empty());
}

TEST(BpeVocab, AgreesWithTheDefinitionOnRandomVocabularies) {
  Rng rng(1);
  for (int round = 0; round < 60; ++round) {
    std::vector<std::string> extra;
    while (extra.size() < 24) {  // any strings, so also tokens that no sequence of merges builds
      std::string token;
      const std::uint64_t length = 2 + rng.below(4);
      for (std::uint64_t i = 0; i < length; ++i) {
        token += static_cast<char>('a' + static_cast<char>(rng.below(3)));
      }
      if (std::find(extra.begin(), extra.end(), token) == extra.end()) {
        extra.push_back(token);
      }
    }
    const std::vector<std::string> tokens = testing::tiny_vocab(extra);
    const BpeVocab vocab = make(tokens);
    for (int word = 0; word < 60; ++word) {
      std::string text;
      const std::uint64_t length = rng.below(40);
      for (std::uint64_t i = 0; i < length; ++i) {
        text += static_cast<char>('a' + static_cast<char>(rng.below(3)));
      }
      if (!text.empty()) {
        ASSERT_EQ(merged(vocab, text), merged_oracle(tokens, text)) << text;
      }
    }
  }
}

TEST(BpeVocab, LinesMayComeInAnyOrderAndWithoutFinalNewline) {
  const std::vector<std::string> tokens = testing::tiny_vocab({"ab"});
  std::string text;
  for (std::size_t i = tokens.size(); i-- > 0;) {
    text += testing::base64(tokens[i]) + " " + std::to_string(i) + (i > 0 ? "\n" : "");
  }
  const BpeVocab vocab = BpeVocab::parse(text, "t").value_or_throw();
  EXPECT_THAT(merged(vocab, "ab"), ElementsAre(256));
  EXPECT_EQ(vocab.bytes(255), std::string(1, '\0'));
}

TEST(BpeVocab, MovingKeepsTheTokens) {
  BpeVocab first = make(testing::tiny_vocab({"ab"}));
  const BpeVocab second = std::move(first);
  EXPECT_THAT(merged(second, "ab"), ElementsAre(256));
}

// Each bad file replaces line 5 (rank 4 = byte 0xFB) of a good one.
class BpeVocabBadLine : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(BpeVocabBadLine, IsRefusedWithItsNumber) {
  const auto& [line, message] = GetParam();
  std::string text;
  const std::vector<std::string> tokens = testing::tiny_vocab({"ab"});
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    text += (i == 4 ? line : testing::base64(tokens[i]) + " " + std::to_string(i)) + "\n";
  }
  const auto vocab = BpeVocab::parse(text, "dir/tiktoken.model");
  ASSERT_FALSE(vocab.ok());
  EXPECT_EQ(vocab.message(), std::string("dir/tiktoken.model:") + message);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, BpeVocabBadLine,
    ::testing::Values(
        std::pair("", "5: expected \"base64 rank\""),
        std::pair("+w==", "5: expected \"base64 rank\""),
        std::pair("+w= 4", "5: the token is not base64"),
        std::pair("+w=! 4", "5: the token is not base64"),
        std::pair("+=w= 4", "5: the token is not base64"),
        std::pair("==== 4", "5: the token is not base64"),
        std::pair("+x== 4", "5: the token is not base64"),  // bits behind the last byte
        std::pair(" 4", "5: the token is not base64"),
        std::pair("+w== 4\r", "5: the rank is not a number in 0..2^31-1"),
        std::pair("+w== ", "5: the rank is not a number in 0..2^31-1"),
        std::pair("+w==  4", "5: the rank is not a number in 0..2^31-1"),
        std::pair("+w== -4", "5: the rank is not a number in 0..2^31-1"),
        std::pair("+w== 4294967300", "5: the rank is not a number in 0..2^31-1"),
        std::pair("+w== 3", "5: rank 3 was given in line 4 already"),
        std::pair("/A== 4", "5: the token was given in line 4 already"),
        std::pair("+w== 257", "5: rank 257 leaves a gap: 257 lines need the ranks 0..256"),
        std::pair("+/s= 4", " no token for the single byte 0xFB")));

TEST(BpeVocab, EveryByteMustBeAToken) {
  const auto vocab = BpeVocab::parse("", "t");
  ASSERT_FALSE(vocab.ok());
  EXPECT_THAT(vocab.message(), HasSubstr("no token for the single byte 0x00"));
}

}  // namespace
}  // namespace tandem
