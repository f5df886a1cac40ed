// Ids of the released merge file. It is not ours to distribute, so these run only where it lies
// beside the repository, as shared/tiktoken.model.
#include <filesystem>

#include <gtest/gtest.h>

#include "text/chat_template.h"
#include "text/kimi_tokenizer.h"

namespace tandem {
namespace {

using Ids = std::vector<std::int32_t>;

class KimiVectors : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string folder = std::string(TDM_SOURCE_DIR) + "/../shared";
    if (!std::filesystem::exists(folder + "/tiktoken.model")) {
      GTEST_SKIP() << "needs Kimi K3's tiktoken.model in ../shared";
    }
    tokenizer_ = KimiTokenizer::load(folder).value_or_throw();
  }

  [[nodiscard]] Ids prompt(const Conversation& conversation) const {
    return tokenizer_->encode_segments(KimiTemplate().render(conversation).value_or_throw());
  }

  std::unique_ptr<KimiTokenizer> tokenizer_;
};

Conversation user_says(std::string text) {
  Conversation conversation;
  conversation.messages = {{.role = ChatRole::kUser,
                            .content = {std::move(text)},
                            .name = {},
                            .reasoning = {},
                            .tool_calls = {},
                            .tool_call_id = {},
                            .tools_json = {}}};
  return conversation;
}

TEST_F(KimiVectors, VocabularyAndStops) {
  EXPECT_EQ(tokenizer_->vocab_size(), 163'840);
  EXPECT_EQ(tokenizer_->special_id("<|end_of_msg|>"), 163'586);
  EXPECT_EQ(Ids(tokenizer_->stop_ids().begin(), tokenizer_->stop_ids().end()),
            (Ids{163'585, 163'586}));
}

TEST_F(KimiVectors, WordsOfTheGrammar) {
  const std::pair<const char*, std::int32_t> words[] = {
      {"message", 2778},   {" role", 6244},     {"=\"", 878},         {"\"", 1},
      {"system", 14062},   {"user", 2482},      {"assistant", 69702}, {"tool", 20960},
      {" tool", 4453},     {" index", 4002},    {" key", 2355},       {" type", 1798},
      {"think", 39964},    {"response", 12092}, {"tools", 25385},     {"call", 10257},
      {"argument", 47185}, {"string", 2033},    {"number", 10006}};
  for (const auto& [word, id] : words) {
    EXPECT_EQ(tokenizer_->encode(word), Ids{id}) << word;
  }
}

TEST_F(KimiVectors, Texts) {
  EXPECT_EQ(tokenizer_->encode("Hello, world! 你好，世界！"),
            (Ids{19180, 11, 2695, 0, 220, 33845, 378, 2243, 856}));
  EXPECT_EQ(tokenizer_->encode("a <|open|> b [BOS] c"),
            (Ids{64, 22652, 4454, 91, 29, 291, 793, 33, 4110, 60, 275}));
  const std::vector<Segment> allowed = {{"a <|open|> b [BOS] c", true}};
  EXPECT_EQ(tokenizer_->encode_segments(allowed), (Ids{64, 220, 163587, 291, 220, 163584, 275}));
  EXPECT_EQ(tokenizer_->encode("a&b \"q\" 日本語 🎉\nsecond line"),
            (Ids{64, 5, 65, 414, 80, 1, 220, 4546, 63011, 17137, 236, 231, 198, 8959, 2470}));
  EXPECT_EQ(tokenizer_->encode("What does [EOS] mean vs [PAD] and [UNK]?"),
            (Ids{5376, 2354, 793, 85521, 60, 4992, 12583, 793, 54904, 60, 316, 793, 57780, 87795}));
}

TEST_F(KimiVectors, Prompts) {
  Conversation conversation = user_says("Hi");
  const Ids hi = {163587, 2778,   6244, 878,  2482, 1,     163589, 18699,  163588, 2778,  163589,
                  163586, 163587, 2778, 6244, 878,  69702, 1,      163589, 163587, 39964, 163589};
  conversation.effort.reset();
  EXPECT_EQ(prompt(conversation), hi);
  conversation.effort = ThinkingEffort::kMax;
  Ids with_effort = {163587, 2778,   6244,   878,    14062,  1,      1798,  878,  130400, 59991,
                     470,    1,      163589, 63,     130400, 123074, 470,   63,   28560,  418,
                     1632,   2455,   308,    2704,   306,    651,    9545,  8491, 347,    2976,
                     3411,   276,    4503,   8491,   904,    9141,   4661,  3867, 1268,   1332,
                     5713,   1268,   50004,  5713,   1268,   19421,  5713,  316,  1268,   5354,
                     16518,  10048,  276,    2403,   387,    42070,  472,   1268, 130400, 123074,
                     470,    105281, 11369,  163588, 2778,   163589, 163586};
  with_effort.insert(with_effort.end(), hi.begin(), hi.end());
  EXPECT_EQ(prompt(conversation), with_effort);
}

TEST_F(KimiVectors, ToolCall) {
  Conversation conversation = user_says("x");
  conversation.effort.reset();
  conversation.add_generation_prompt = false;
  conversation.messages[0].role = ChatRole::kAssistant;
  conversation.messages[0].tool_calls = {{"1", "get_weather", R"({"city": "Paris", "days": 3})"}};
  const Ids call = {163587, 25385,  163589, 163587, 10257,  4453,   878,    618,    21055,
                    2800,   1,      4002,   878,    16,     1,      163589, 163587, 47185,
                    2355,   878,    37666,  1,      1798,   878,    2033,   1,      163589,
                    113476, 163588, 47185,  163589, 163587, 47185,  2355,   878,    21030,
                    1,      1798,   878,    10006,  1,      163589, 18,     163588, 47185,
                    163589, 163588, 10257,  163589, 163588, 25385,  163589};
  const Ids ids = prompt(conversation);
  ASSERT_GT(ids.size(), call.size() + 4);
  const auto end = ids.end() - 4;  // close("message") and the end of the message
  EXPECT_EQ(Ids(end - static_cast<std::ptrdiff_t>(call.size()), end), call);
}

}  // namespace
}  // namespace tandem
