#include "text/kimi_tokenizer.h"

#include <filesystem>
#include <fstream>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/rng.h"
#include "support/tiny_vocab.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ids = std::vector<std::int32_t>;

const std::vector<std::string>& tokens() {
  static const std::vector<std::string> kTokens =
      testing::tiny_vocab({"aa", "aaaa", " b", "he", "llo", "hello", "\xE4\xBD", "<|", "|>"});
  return kTokens;
}
constexpr std::int32_t kBase = 265;  // 256 bytes and 9 tokens

std::unique_ptr<KimiTokenizer> make() {
  BpeVocab vocab = BpeVocab::parse(testing::tiktoken_text(tokens()), "t").value_or_throw();
  return KimiTokenizer::create(std::move(vocab), KimiTokenizer::k3_specials()).value_or_throw();
}

// A folder with a tiktoken.model, removed at the end.
class CheckpointFolder {
 public:
  CheckpointFolder() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ =
        std::filesystem::path(::testing::TempDir()) / (std::string("tandem_kimi_") + test->name());
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
    write("tiktoken.model", testing::tiktoken_text(tokens()));
  }
  ~CheckpointFolder() { std::filesystem::remove_all(path_); }
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
  }
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

TEST(KimiTokenizer, SpecialsStandBehindTheLastRank) {
  const auto tokenizer = make();
  EXPECT_EQ(tokenizer->vocab_size(), kBase + 256);
  EXPECT_EQ(tokenizer->special_id("[BOS]"), kBase);
  EXPECT_EQ(tokenizer->special_id("<|end_of_msg|>"), kBase + 2);
  EXPECT_EQ(tokenizer->special_id("<|reserved_token_273|>"), kBase + 8);
  EXPECT_EQ(tokenizer->special_id("[EOT]"), kBase + 9);
  EXPECT_EQ(tokenizer->special_id("<osagent_mode>"), kBase + 65);
  EXPECT_EQ(tokenizer->special_id("[PAD]"), kBase + 255);
  EXPECT_EQ(tokenizer->special_id("<|im_end|>"), std::nullopt);
  EXPECT_THAT(tokenizer->stop_ids(), ElementsAre(kBase + 1, kBase + 2));
  std::set<std::string> spellings;
  for (std::int32_t id = kBase; id < kBase + 256; ++id) {
    spellings.emplace(tokenizer->token_bytes(id));
  }
  EXPECT_EQ(spellings.size(), 256U);
}

TEST(KimiTokenizer, EncodesPreTokensSeparately) {
  const auto tokenizer = make();
  EXPECT_EQ(tokenizer->encode("hello b"), (Ids{261, 258}));
  EXPECT_EQ(tokenizer->encode(""), Ids{});
  // "aa" may not form across the border between a word and a contraction's start.
  EXPECT_EQ(tokenizer->encode("Aaa"), (Ids{testing::byte_id('A'), 256}));
}

TEST(KimiTokenizer, SpecialSpellingsInOrdinaryTextStayText) {
  const auto tokenizer = make();
  const std::string text = "a <|open|> b [BOS] c <|reserved_token_273|>";
  const Ids ids = tokenizer->encode(text);
  for (const std::int32_t id : ids) {
    EXPECT_LT(id, kBase);
  }
  EXPECT_EQ(tokenizer->decode(ids), text);
}

TEST(KimiTokenizer, SegmentsDecideAboutSpecials) {
  const auto tokenizer = make();
  const std::int32_t open = kBase + 3;
  const std::vector<Segment> segments = {
      {"<|open|>", true}, {"<|open|>", false}, {"a<|open|>b[BOS]", true}, {"", true}, {"", false}};
  const Ids plain = tokenizer->encode("<|open|>");
  Ids expected = {open};
  expected.insert(expected.end(), plain.begin(), plain.end());
  expected.insert(expected.end(), {testing::byte_id('a'), open, testing::byte_id('b'), kBase});
  EXPECT_EQ(tokenizer->encode_segments(segments), expected);
}

TEST(KimiTokenizer, NoMergeCrossesASegment) {
  const auto tokenizer = make();
  const std::vector<Segment> apart = {{"he", false}, {"llo", false}};
  EXPECT_EQ(tokenizer->encode_segments(apart), (Ids{259, 260}));
  const std::vector<Segment> around = {{"he[BOS]llo", true}};
  EXPECT_EQ(tokenizer->encode_segments(around), (Ids{259, kBase, 260}));
}

TEST(KimiTokenizer, UnfinishedSpecialSpellingsAreText) {
  const auto tokenizer = make();
  for (const std::string text : {"<|open|", "<", "[BOS", "<|<|<|", "[[[", "<|reserved_token_1|>"}) {
    const std::vector<Segment> segment = {{text, true}};
    EXPECT_EQ(tokenizer->encode_segments(segment), tokenizer->encode(text)) << text;
  }
  const std::vector<Segment> nested = {{"<|<|open|>", true}};
  EXPECT_EQ(tokenizer->encode_segments(nested), (Ids{263, kBase + 3}));
}

TEST(KimiTokenizer, DecodeKeepsTheGrammarMarkersAndSkipsControls) {
  const auto tokenizer = make();
  const Ids ids = {kBase, kBase + 3, 259, kBase + 4, kBase + 5, kBase + 2, kBase + 100};
  EXPECT_EQ(tokenizer->decode(ids),
            "[BOS]<|open|>he<|close|><|sep|><|end_of_msg|><|reserved_token_365|>");
  EXPECT_EQ(tokenizer->decode(ids, SpecialText::kSkip), "<|open|>he<|close|><|sep|>");
}

TEST(KimiTokenizer, IdsWithoutATokenDecodeToTheReplacementCharacter) {
  const auto tokenizer = make();
  const Ids ids = {-1, kBase + 256, 1'000'000};
  EXPECT_EQ(tokenizer->decode(ids), "\uFFFD\uFFFD\uFFFD");
}

TEST(KimiTokenizer, RandomBytesRoundTrip) {
  const auto tokenizer = make();
  Rng rng(2);
  for (int round = 0; round < 500; ++round) {
    std::string text;
    const std::uint64_t length = rng.below(60);
    const bool ascii = rng.below(2) == 0;
    for (std::uint64_t i = 0; i < length; ++i) {
      text += static_cast<char>(static_cast<unsigned char>(rng.below(ascii ? 128 : 256)));
    }
    ASSERT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  }
}

TEST(KimiTokenizer, LongRunsAreCutAndEachPartMergesAlone) {
  const auto tokenizer = make();
  Ids expected(6'250, 257);  // 25,000 letters as aaaa
  expected.push_back(testing::byte_id('a'));
  EXPECT_EQ(tokenizer->encode(std::string(25'001, 'a')), expected);
}

TEST(KimiTokenizer, MillionCharacterRunsAreEncoded) {
  const auto tokenizer = make();
  const std::string run(1'000'000, 'a');
  EXPECT_EQ(tokenizer->encode(run), Ids(250'000, 257));
  for (const std::string_view unit : {" ", "\n", "a1", "A", "\xFF", "\u0301", " \n", "!", "你"}) {
    std::string text;
    while (text.size() < 1'000'000) {
      text += unit;
    }
    ASSERT_EQ(tokenizer->decode(tokenizer->encode(text)), text) << unit;
  }
}

TEST(KimiTokenizer, LoadsWithoutConfigs) {
  const CheckpointFolder folder;
  const auto tokenizer = load_tokenizer(folder.path()).value_or_throw();
  EXPECT_EQ(tokenizer->special_id("<|open|>"), kBase + 3);
  EXPECT_THAT(tokenizer->stop_ids(), ElementsAre(kBase + 1, kBase + 2));
}

TEST(KimiTokenizer, TakesTheNamesOfTheCheckpoint) {
  const CheckpointFolder folder;
  folder.write("tokenizer_config.json", R"({"eos_token": "[EOS]", "added_tokens_decoder": {
      "265": {"content": "[BOS]", "special": true}, "266": {"content": "[EOS]", "special": true},
      "267": {"content": "<|im_end|>", "special": true}, "280": {"content": "<x>"}}})");
  folder.write("generation_config.json", R"({"eos_token_id": [267, 300]})");
  const auto tokenizer = load_tokenizer(folder.path()).value_or_throw();
  EXPECT_EQ(tokenizer->special_id("<|im_end|>"), kBase + 2);
  EXPECT_EQ(tokenizer->special_id("<|open|>"), std::nullopt);
  EXPECT_EQ(tokenizer->special_id("<|reserved_token_268|>"), kBase + 3);
  EXPECT_FALSE(tokenizer->is_control(280));
  EXPECT_THAT(tokenizer->stop_ids(), ElementsAre(266, 267, 300));
}

TEST(KimiTokenizer, BadConfigsNameFileAndField) {
  const std::pair<const char*, const char*> cases[] = {
      {"{", "tokenizer_config.json: "},
      {"[]", "tokenizer_config.json: expected a JSON object"},
      {R"({"added_tokens_decoder": []})", "added_tokens_decoder: expected an object"},
      {R"({"added_tokens_decoder": {"264": {"content": "x"}}})", "expected ids 265..520"},
      {R"({"added_tokens_decoder": {"521": {"content": "x"}}})", "expected ids 265..520"},
      {R"({"added_tokens_decoder": {"27x": {"content": "x"}}})", "expected ids 265..520"},
      {R"({"added_tokens_decoder": {"270": {}}})", "\"270\": expected an object with a string"},
      {R"({"added_tokens_decoder": {"270": {"content": "x"}, "271": {"content": "x"}}})",
       "special token \"x\" has two ids, 270 and 271"},
      {R"({"added_tokens_decoder": {"270": {"content": ""}}})", "special token 270"},
      {R"({"eos_token": 3})", "eos_token: expected a string"},
      {R"({"eos_token": "<nope>"})", "eos_token \"<nope>\" is not among"},
  };
  const CheckpointFolder folder;
  for (const auto& [config, message] : cases) {
    folder.write("tokenizer_config.json", config);
    const auto tokenizer = load_tokenizer(folder.path());
    ASSERT_FALSE(tokenizer.ok()) << config;
    EXPECT_THAT(tokenizer.message(), HasSubstr("tokenizer_config.json")) << config;
    EXPECT_THAT(tokenizer.message(), HasSubstr(message)) << config;
  }
  folder.write("tokenizer_config.json", "{}");
  for (const char* config :
       {R"({"eos_token_id": 521})", R"({"eos_token_id": "2"})", R"({"eos_token_id": [-1]})"}) {
    folder.write("generation_config.json", config);
    const auto tokenizer = load_tokenizer(folder.path());
    ASSERT_FALSE(tokenizer.ok()) << config;
    EXPECT_THAT(tokenizer.message(), HasSubstr("generation_config.json: eos_token_id")) << config;
  }
}

TEST(LoadTokenizer, NeedsExactlyOneTokenizerFile) {
  const CheckpointFolder folder;
  folder.write("char_tokenizer.json", "{}");
  EXPECT_THAT(load_tokenizer(folder.path()).message(), HasSubstr("has both"));
  EXPECT_THAT(load_tokenizer(folder.path() + "/nowhere").message(), HasSubstr("no tokenizer"));
}

}  // namespace
}  // namespace tandem
