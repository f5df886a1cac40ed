#include "text/response_constraint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "text/char_tokenizer.h"
#include "text/chat_template.h"
#include "text/grammar/grammar_session.h"
#include "text/response_parser.h"

namespace tandem {
namespace {

using nlohmann::json;
using testing::GrammarSession;
using ::testing::HasSubstr;

const GrammarSession& session() {
  static const GrammarSession kSession;
  return kSession;
}
const KimiTokenizer& kimi() {
  return session().tokenizer();
}
std::int32_t marker(const std::string& name) {
  return kimi().special_id(name).value();
}

// What the model writes for `message`, as the reference renderer spells it.
std::vector<std::int32_t> output_of(const ChatMessage& message, bool thinking) {
  Conversation conversation;
  conversation.thinking = thinking;
  conversation.effort.reset();
  const auto prompt = kimi().encode_segments(KimiTemplate().render(conversation).value_or_throw());
  conversation.messages = {message};
  conversation.add_generation_prompt = false;
  const auto whole = kimi().encode_segments(KimiTemplate().render(conversation).value_or_throw());
  return {whole.begin() + isize(prompt), whole.end()};
}

ChatMessage say(const std::string& reasoning, const std::string& text,
                std::vector<ToolCall> calls = {}) {
  ChatMessage message;
  message.role = ChatRole::kAssistant;
  message.reasoning = reasoning;
  message.content = {text};
  message.tool_calls = std::move(calls);
  return message;
}

// Walks the ids through accept() and the masks; how many were allowed.
std::size_t allowed_prefix(TokenConstraint& constraint, const std::vector<std::int32_t>& ids) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (constraint.is_active()) {
      const auto allowed = session().allowed(constraint);
      const bool in_mask = std::find(allowed.begin(), allowed.end(), ids[i]) != allowed.end();
      const auto copy = constraint.clone();
      EXPECT_EQ(copy->accept(ids[i]), in_mask) << i;
    }
    if (!constraint.accept(ids[i])) {
      return i;
    }
  }
  return ids.size();
}

TEST(AnswerConstraint, CoversTheAnswerAndItsEnd) {
  const auto grammar = compile_json_schema(R"({"items":{"type":"integer"}})").value_or_throw();
  for (const bool thinking : {true, false}) {
    const auto ids = output_of(say("[12", "[1, 2]"), thinking);
    auto constraint = make_answer_constraint(*grammar, session().trie(), kimi(), thinking);
    EXPECT_EQ(constraint->is_active(), !thinking);
    EXPECT_EQ(allowed_prefix(*constraint, ids), ids.size());
    EXPECT_TRUE(constraint->is_complete());
    constraint = make_answer_constraint(*grammar, session().trie(), kimi(), thinking);
    EXPECT_LT(allowed_prefix(*constraint, output_of(say("x", "[1, 2"), thinking)), ids.size());
    constraint = make_answer_constraint(*grammar, session().trie(), kimi(), thinking);
    const auto calls = output_of(say("", "[1]", {{"", "f", ""}}), thinking);
    EXPECT_LT(allowed_prefix(*constraint, calls), calls.size());
  }
}

TEST(AnswerConstraint, ThinkingIsFreeAndMayEndWithoutItsClose) {
  const auto grammar = compile_json_object().value_or_throw();
  const auto constraint = make_answer_constraint(*grammar, session().trie(), kimi(), true);
  const auto feed = [&](const std::string& text) {
    for (const std::int32_t id : kimi().encode(text)) {
      ASSERT_TRUE(constraint->accept(id));
    }
  };
  feed("not json <|close|>think<|sep|>");
  EXPECT_TRUE(constraint->accept(marker("<|open|>")));
  feed("strange");
  EXPECT_TRUE(constraint->accept(marker("<|sep|>")));
  EXPECT_FALSE(constraint->is_active());
  EXPECT_TRUE(constraint->accept(marker("<|open|>")));
  feed("response");
  EXPECT_FALSE(constraint->is_active());
  EXPECT_TRUE(constraint->accept(marker("<|sep|>")));
  ASSERT_TRUE(constraint->is_active());
  const auto allowed = session().allowed(*constraint);
  ASSERT_FALSE(allowed.empty());
  for (const std::int32_t id : allowed) {
    EXPECT_EQ(kimi().token_bytes(id).front(), '{');
  }
}

TEST(AnswerConstraint, ModelsWithoutChannelsAreConstrainedFromTheStart) {
  const auto tokenizer =
      CharTokenizer::create(
          {.tokens = {"a", "b", "1"}, .special = {"<unk>", "<eos>"}, .stop = {"<eos>"}})
          .value_or_throw();
  const auto grammar = compile_regex("a+").value_or_throw();
  const auto constraint =
      make_answer_constraint(*grammar, make_token_trie(*tokenizer), *tokenizer, true);
  EXPECT_TRUE(constraint->is_active());
  std::vector<std::uint32_t> bits(1);
  constraint->fill_mask(bits);
  EXPECT_EQ(bits[0], 1U);
  EXPECT_TRUE(constraint->accept(0));
  constraint->fill_mask(bits);
  EXPECT_EQ(bits[0], 1U | 1U << 4);
}

const std::vector<ToolGrammar> kTools = {
    {"get_weather", R"({"type":"object","properties":{
        "city":{"type":"string","description":"where","minLength":1,"maxLength":9},
        "unit":{"enum":["c","f"]},
        "days":{"type":"integer","minimum":1,"maximum":12}},"required":["city"]})"},
    {"get_time", ""},
    {"run \"&", R"({"properties":{"v":{},"t":{"$ref":"#/$defs/t"},
        "d":{"type":"string","format":"date"}},"required":["t"],
        "$defs":{"t":{"anyOf":[{"type":"string","pattern":"^ab+$"},{"type":"null"},
                               {"type":"array","items":{"$ref":"#/$defs/t"},"maxItems":2}]}}})"},
};

std::unique_ptr<TokenConstraint> tool_constraint(bool thinking, bool parallel = true) {
  return make_tool_call_constraint(kTools, parallel, session().trie(), kimi(), thinking)
      .value_or_throw();
}

TEST(ToolCallConstraint, TakesWhatTheRendererWrites) {
  const std::vector<std::vector<ToolCall>> good = {
      {{"", "get_time", ""}},
      {{"", "get_weather", R"({"city": "Par\"is 日"})"}},
      {{"", "get_weather", R"({"city": "x", "unit": "f", "days": 12})"},
       {"", "get_time", ""},
       {"", "get_weather", R"({"city": "x", "days": 3})"}},
      {{"", "run \"&", R"({"t": "abb"})"}},
      {{"", "run \"&", R"({"v": {"a": [1]}, "t": null, "d": "2024-02-29"})"}},
      {{"", "run \"&", R"({"v": "free <|close|>", "t": ["ab", [null]]})"}},
  };
  const std::vector<std::vector<ToolCall>> bad = {
      {},
      {{"", "get_weather", ""}},
      {{"", "get_weather", R"({"unit": "c"})"}},
      {{"", "get_weather", R"({"city": ""})"}},
      {{"", "get_weather", R"({"city": "0123456789"})"}},
      {{"", "get_weather", R"({"city": 3})"}},
      {{"", "get_weather", R"({"city": "x", "unit": "k"})"}},
      {{"", "get_weather", R"({"city": "x", "days": 13})"}},
      {{"", "get_weather", R"({"city": "x", "more": 1})"}},
      {{"", "get_weather", R"({"city": "x", "days": "3"})"}},
      {{"", "get_stock", ""}},
      {{"", "get_time", R"({"x": 1})"}},
      {{"", "run \"&", R"({"t": "b"})"}},
      {{"", "run \"&", R"({"t": ["ab", "ab", "ab"]})"}},
      {{"", "run \"&", R"({"t": "ab", "d": "2023-02-29"})"}},
  };
  for (const bool thinking : {true, false}) {
    for (const auto& calls : good) {
      const auto ids = output_of(say("Hm", "Let me see. 日", calls), thinking);
      const auto constraint = tool_constraint(thinking);
      EXPECT_EQ(allowed_prefix(*constraint, ids), ids.size()) << calls[0].arguments;
      EXPECT_TRUE(constraint->is_complete());
    }
    for (const auto& calls : bad) {
      const auto ids = output_of(say("Hm", "", calls), thinking);
      EXPECT_LT(allowed_prefix(*tool_constraint(thinking), ids), ids.size())
          << (calls.empty() ? "" : calls[0].arguments);
    }
  }
}

TEST(ToolCallConstraint, OneCallOrManyButNotWithoutEnd) {
  const auto of = [](std::size_t count) {
    return output_of(say("", "", std::vector<ToolCall>(count, {"", "get_time", ""})), false);
  };
  EXPECT_EQ(allowed_prefix(*tool_constraint(false, false), of(1)), of(1).size());
  EXPECT_LT(allowed_prefix(*tool_constraint(false, false), of(2)), of(2).size());
  EXPECT_EQ(allowed_prefix(*tool_constraint(false), of(128)), of(128).size());
  EXPECT_LT(allowed_prefix(*tool_constraint(false), of(129)), of(129).size());
}

// Whatever the masks let through parses into calls whose arguments fit.
TEST(ToolCallConstraint, RandomWalksGiveCalls) {
  Rng rng(31);
  int finished = 0;
  for (int round = 0; round < 60; ++round) {
    const auto constraint = tool_constraint(round % 2 == 0);
    const auto parser = make_response_parser(kimi(), round % 2 == 0);
    std::vector<std::pair<std::string, std::string>> calls;
    const auto feed = [&](std::int32_t id) {
      ASSERT_TRUE(constraint->accept(id));
      for (const ResponsePiece& piece : parser->push(id)) {
        if (piece.channel == Channel::kToolCall) {
          if (!piece.call_name.empty()) {
            calls.emplace_back(piece.call_name, "");
          }
          calls.back().second += piece.text;
        }
      }
    };
    if (!constraint->is_active()) {
      feed(marker("<|close|>"));
      for (const std::int32_t id : kimi().encode("think")) {
        feed(id);
      }
      feed(marker("<|sep|>"));
    }
    ASSERT_TRUE(constraint->is_active());
    for (int step = 0; step < 600 && !constraint->is_complete(); ++step) {
      const auto allowed = session().allowed(*constraint);
      ASSERT_FALSE(allowed.empty());
      const bool can_close =
          std::find(allowed.begin(), allowed.end(), marker("<|close|>")) != allowed.end();
      const bool closes = can_close && rng.below(3) == 0;
      feed(closes ? marker("<|close|>") : allowed[rng.below(allowed.size())]);
    }
    if (!constraint->is_complete()) {
      continue;
    }
    ++finished;
    ASSERT_FALSE(calls.empty());
    EXPECT_EQ(parser->num_complete_calls(), isize(calls));
    for (const auto& [name, arguments] : calls) {
      const json value = json::parse(arguments, nullptr, false);
      ASSERT_TRUE(value.is_object()) << arguments;
      if (name == "get_time") {
        EXPECT_TRUE(value.empty()) << arguments;
      } else if (name == "get_weather") {
        EXPECT_TRUE(value.at("city").is_string()) << arguments;
        EXPECT_TRUE(!value.contains("days") || (value["days"] >= 1 && value["days"] <= 12));
      } else {
        EXPECT_TRUE(value.contains("t")) << arguments;
      }
    }
  }
  EXPECT_GT(finished, 20);
}

TEST(ToolCallConstraint, ErrorsNameTheTool) {
  const auto message = [](const std::vector<ToolGrammar>& tools) {
    const auto made = make_tool_call_constraint(tools, true, session().trie(), kimi(), true);
    return made.ok() ? std::string() : made.message();
  };
  EXPECT_THAT(message({}), HasSubstr("at least one tool"));
  EXPECT_THAT(message({{"f", ""}, {"f", ""}}), HasSubstr("tool \"f\": expected a name"));
  EXPECT_THAT(message({{"f", "{"}}), HasSubstr("tool \"f\": parameters: not JSON"));
  EXPECT_THAT(message({{"f", R"({"properties":{"a":{"not":{}}}})"}}),
              HasSubstr("not supported: #/properties/a/not"));
  EXPECT_THAT(message({{"f", R"({"type":"array"})"}}), HasSubstr("#: expected type object"));
  EXPECT_THAT(message({{"f", R"({"anyOf":[{},{}]})"}}), HasSubstr("without alternatives"));
  EXPECT_THAT(message({{"f", R"({"properties":{"a":false},"required":["a"]})"}}),
              HasSubstr("property \"a\": no text can match"));
  EXPECT_EQ(message({{"f", R"({"properties":{"a":false}})"}}), "");
  std::string many;
  for (int i = 0; i < 129; ++i) {
    many += fmt::format(R"({}"p{}":true)", i > 0 ? "," : "", i);
  }
  EXPECT_THAT(message({{"f", fmt::format(R"({{"properties":{{{}}}}})", many)}}),
              HasSubstr("129 properties"));
}

}  // namespace
}  // namespace tandem
