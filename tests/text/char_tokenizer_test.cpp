#include "text/char_tokenizer.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/rng.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ids = std::vector<std::int32_t>;

CharTokenizer::Spec spec() {
  return {.tokens = {"a", "b", "c", " ", "\n", "é", "ab", "abcab", "日", " pens"},
          .special = {"<eos>", "<unk>"},
          .stop = {"<eos>"}};
}

std::unique_ptr<CharTokenizer> make() {
  return CharTokenizer::create(spec()).value_or_throw();
}

std::string temp_path(const std::string& name) {
  return (std::filesystem::path(::testing::TempDir()) / ("tandem_char_" + name)).string();
}

TEST(CharTokenizer, LongestMatchWinsAtEachPlace) {
  const auto tokenizer = make();
  EXPECT_EQ(tokenizer->encode("abcab"), (Ids{7}));
  EXPECT_EQ(tokenizer->encode("abca"), (Ids{6, 2, 0}));  // the trie went deeper, the match did not
  EXPECT_EQ(tokenizer->encode("aab"), (Ids{0, 6}));
  EXPECT_EQ(tokenizer->encode("a pensé"), (Ids{0, 9, 5}));
  EXPECT_EQ(tokenizer->encode(""), Ids{});
}

TEST(CharTokenizer, UnknownCharactersBecomeOneTokenEach) {
  const auto tokenizer = make();
  EXPECT_EQ(tokenizer->vocab_size(), 12);
  const Ids ids = tokenizer->encode(
      "x日本\xFF"
      "a");  // 本 shares no start with a token's end
  EXPECT_EQ(ids, (Ids{11, 8, 11, 11, 0}));
  EXPECT_EQ(tokenizer->decode(ids), "\uFFFD日\uFFFD\uFFFDa");
  EXPECT_EQ(tokenizer->decode(ids, SpecialText::kSkip), "\uFFFD日\uFFFD\uFFFDa");
}

TEST(CharTokenizer, SpecialsOnlyWhereAllowed) {
  const auto tokenizer = make();
  const std::vector<Segment> segments = {{"a<eos>b", true}, {"<eos>", false}};
  EXPECT_EQ(tokenizer->encode_segments(segments), (Ids{0, 10, 1, 11, 11, 11, 11, 11}));
  EXPECT_THAT(tokenizer->stop_ids(), ElementsAre(10));
  EXPECT_EQ(tokenizer->special_id("<eos>"), 10);
  const Ids ids = {0, 10};
  EXPECT_EQ(tokenizer->decode(ids), "a<eos>");
  EXPECT_EQ(tokenizer->decode(ids, SpecialText::kSkip), "a");
  const Ids outside = {-1, 12};
  EXPECT_EQ(tokenizer->decode(outside), "\uFFFD\uFFFD");
}

TEST(CharTokenizer, KnownTextRoundTrips) {
  const auto tokenizer = make();
  const std::vector<std::string> known = spec().tokens;
  Rng rng(3);
  for (int round = 0; round < 1000; ++round) {
    std::string text;
    const std::uint64_t length = rng.below(30);
    for (std::uint64_t i = 0; i < length; ++i) {
      text += known[rng.below(9)];  // characters and words, but " pens" has unknown letters
    }
    ASSERT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  }
}

TEST(CharTokenizer, SavedFileGivesTheSameTokenizer) {
  const std::string path = temp_path("saved.json");
  const auto first = make();
  first->save(path);
  const auto second = CharTokenizer::load(path).value_or_throw();
  ASSERT_EQ(second->vocab_size(), first->vocab_size());
  for (std::int32_t id = 0; id < first->vocab_size(); ++id) {
    EXPECT_EQ(second->token_bytes(id), first->token_bytes(id));
    EXPECT_EQ(second->is_control(id), first->is_control(id));
  }
  EXPECT_THAT(second->stop_ids(), ElementsAre(10));
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
  std::filesystem::remove(path);
}

TEST(CharTokenizer, SaveReportsAFolderThatIsNotThere) {
  EXPECT_THROW(make()->save(temp_path("none/x.json")), Error);
}

TEST(CharTokenizer, BadFilesNameTheField) {
  const std::pair<const char*, const char*> cases[] = {
      {"", ": "},
      {"[]", "expected a JSON object"},
      {R"({"tokens": [], "special": [], "stop": []})", "type: expected \"char\""},
      {R"({"type": "bpe", "tokens": [], "special": [], "stop": []})", "type: expected \"char\""},
      {R"({"type": "char", "special": [], "stop": []})", "tokens: expected a list"},
      {R"({"type": "char", "tokens": ["a", 1], "special": [], "stop": []})",
       "tokens[1]: expected a string, got number"},
      {R"({"type": "char", "tokens": ["a", ""], "special": [], "stop": []})", "tokens[1]: "},
      {R"({"type": "char", "tokens": ["a", "b", "a"], "special": [], "stop": []})",
       "tokens[2]: \"a\" is there twice"},
      {R"({"type": "char", "tokens": ["a"], "special": ["<eos>"], "stop": []})",
       "special: expected \"<unk>\""},
      {R"({"type": "char", "tokens": ["a"], "special": ["<unk>", "<unk>"], "stop": []})",
       "has two ids, 1 and 2"},
      {R"({"type": "char", "tokens": ["a"], "special": ["<unk>"], "stop": ["<eos>"]})",
       "stop: \"<eos>\" is not in special"},
      {R"({"type": "char", "tokens": ["a"], "special": ["<unk>"], "stop": [], "x": 1})",
       "unknown field \"x\""},
      {"{\"type\": \"char\", \"tokens\": [\"\xFF\"], \"special\": [\"<unk>\"], \"stop\": []}",
       "UTF-8"},
  };
  const std::string path = temp_path("bad.json");
  for (const auto& [text, message] : cases) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
    const auto tokenizer = CharTokenizer::load(path);
    ASSERT_FALSE(tokenizer.ok()) << text;
    EXPECT_THAT(tokenizer.message(), HasSubstr(path)) << text;
    EXPECT_THAT(tokenizer.message(), HasSubstr(message)) << text;
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace tandem
