#include "text/response_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "support/tiny_vocab.h"
#include "text/char_tokenizer.h"
#include "text/chat_template.h"
#include "text/kimi_tokenizer.h"
#include "text/utf8.h"

namespace tandem {
namespace {

const KimiTokenizer& kimi() {
  static const auto kTokenizer = [] {
    const auto tokens =
        testing::tiny_vocab({"think", "response", "tools", "call", "argument", " tool", "=\"",
                             "\xE4\xBD", "a\xE4", "\xBD\xA0", "ab", "\":", "12", "ue", "message"});
    BpeVocab vocab = BpeVocab::parse(testing::tiktoken_text(tokens), "t").value_or_throw();
    return KimiTokenizer::create(std::move(vocab), KimiTokenizer::k3_specials()).value_or_throw();
  }();
  return *kTokenizer;
}

// {o} {c} {s} are the markers, {end} and {eos} the terminators; everything else is text.
std::vector<std::int32_t> ids_of(const std::string& script) {
  const std::vector<std::pair<std::string, std::string>> markers = {{"{o}", "<|open|>"},
                                                                    {"{c}", "<|close|>"},
                                                                    {"{s}", "<|sep|>"},
                                                                    {"{end}", "<|end_of_msg|>"},
                                                                    {"{eos}", "[EOS]"}};
  std::vector<std::int32_t> ids;
  std::string text;
  const auto flush = [&] {
    const auto encoded = kimi().encode(text);
    ids.insert(ids.end(), encoded.begin(), encoded.end());
    text.clear();
  };
  for (std::size_t at = 0; at < script.size();) {
    const auto marker = std::find_if(markers.begin(), markers.end(), [&](const auto& candidate) {
      return script.compare(at, candidate.first.size(), candidate.first) == 0;
    });
    if (marker == markers.end()) {
      text += script[at++];
    } else {
      flush();
      ids.push_back(kimi().special_id(marker->second).value());
      at += marker->first.size();
    }
  }
  flush();
  return ids;
}

struct Call {
  std::string name;
  std::string arguments;
  bool complete = false;

  friend bool operator==(const Call&, const Call&) = default;
};

void PrintTo(const Call& call, std::ostream* out) {
  *out << call.name << "(" << call.arguments << ")" << (call.complete ? "" : "...");
}

struct Parsed {
  std::string reasoning;
  std::string answer;
  std::vector<Call> calls;
  std::int64_t num_tokens = 0;
  std::int64_t reasoning_tokens = 0;

  void add(const std::vector<ResponsePiece>& pieces) {
    for (const ResponsePiece& piece : pieces) {
      ASSERT_TRUE(is_valid_utf8(piece.text));
      ASSERT_GE(piece.num_tokens, 0);
      num_tokens += piece.num_tokens;
      if (piece.channel == Channel::kReasoning) {
        reasoning += piece.text;
        reasoning_tokens += piece.num_tokens;
      } else if (piece.channel == Channel::kAnswer) {
        answer += piece.text;
      } else if (piece.channel == Channel::kMarkup) {
        ASSERT_EQ(piece.text, "");
      } else {
        add_call(piece);
      }
    }
  }

  void add_call(const ResponsePiece& piece) {
    if (!piece.call_name.empty()) {
      ASSERT_EQ(piece.call_index, isize(calls));
      calls.push_back({piece.call_name, "", false});
    }
    ASSERT_EQ(piece.call_index, isize(calls) - 1);
    ASSERT_FALSE(calls.back().complete);
    calls.back().arguments += piece.text;
    calls.back().complete = piece.call_complete;
  }
};

Parsed parse(const std::vector<std::int32_t>& ids, bool thinking = true) {
  const auto parser = make_response_parser(kimi(), thinking);
  Parsed result;
  for (const std::int32_t id : ids) {
    result.add(parser->push(id));
  }
  result.add(parser->finish());
  EXPECT_EQ(result.num_tokens, isize(ids));
  EXPECT_EQ(parser->num_reasoning_tokens(), result.reasoning_tokens);
  EXPECT_EQ(parser->num_complete_calls(),
            std::count_if(result.calls.begin(), result.calls.end(),
                          [](const Call& call) { return call.complete; }));
  return result;
}

const std::string kThought = "I think{c}think{s}";
const std::string kEnd = "{c}message{s}{end}";
std::string answer(const std::string& text) {
  return fmt::format("{{o}}response{{s}}{}{{c}}response{{s}}", text);
}
std::string argument(const std::string& key, const std::string& type, const std::string& value) {
  return fmt::format("{{o}}argument key=\"{}\" type=\"{}\"{{s}}{}{{c}}argument{{s}}", key, type,
                     value);
}
std::string call(const std::string& name, const std::string& body) {
  return fmt::format("{{o}}call tool=\"{}\" index=\"1\"{{s}}{}{{c}}call{{s}}", name, body);
}
std::string tools(const std::string& calls) {
  return fmt::format("{{o}}tools{{s}}{}{{c}}tools{{s}}", calls);
}

TEST(KimiResponseParser, AWholeTurn) {
  const Parsed result = parse(
      ids_of(kThought + answer("Hi <|close|> 你") +
             tools(call("get_weather", argument("city", "string", "Par\"is\n") +
                                           argument("days", "number", "3") +
                                           argument("opts", "object", R"({"a": [1, null]})")) +
                   call("now", "")) +
             kEnd));
  EXPECT_EQ(result.reasoning, "I think");
  EXPECT_EQ(result.answer, "Hi <|close|> 你");
  EXPECT_EQ(result.calls,
            (std::vector<Call>{
                {"get_weather", R"({"city":"Par\"is\n","days":3,"opts":{"a": [1, null]}})", true},
                {"now", "{}", true}}));
}

TEST(KimiResponseParser, WithoutThinkingTheAnswerComesAtOnce) {
  const Parsed result = parse(ids_of("Hi{c}response{s}" + kEnd), false);
  EXPECT_EQ(result.answer, "Hi");
  EXPECT_EQ(result.reasoning, "");
}

TEST(KimiResponseParser, ChannelsFollowTheMarkers) {
  const auto parser = make_response_parser(kimi(), true);
  const auto after = [&](const std::string& script) {
    for (const std::int32_t id : ids_of(script)) {
      static_cast<void>(parser->push(id));
    }
    return parser->channel();
  };
  EXPECT_EQ(parser->channel(), Channel::kReasoning);
  EXPECT_EQ(after("abc"), Channel::kReasoning);
  EXPECT_EQ(after("{c}"), Channel::kMarkup);
  EXPECT_EQ(after("think"), Channel::kMarkup);
  EXPECT_EQ(after("{s}"), Channel::kMarkup);
  EXPECT_EQ(after("{o}response{s}"), Channel::kAnswer);
  EXPECT_EQ(after("x{c}response{s}{o}tools{s}{o}call tool=\"f\" index=\"1\"{s}"), Channel::kMarkup);
  EXPECT_EQ(after("{o}argument key=\"k\" type=\"string\"{s}"), Channel::kToolCall);
  EXPECT_EQ(after("{c}argument{s}"), Channel::kMarkup);
  EXPECT_EQ(parser->num_reasoning_tokens(), isize(kimi().encode("abc")));
}

TEST(KimiResponseParser, StringsStreamWhileTheyAreGenerated) {
  const auto parser = make_response_parser(kimi(), false);
  const auto text_of = [&](const std::string& script) {
    std::string text;
    for (const std::int32_t id : ids_of(script)) {
      for (const ResponsePiece& piece : parser->push(id)) {
        text += piece.channel == Channel::kToolCall ? piece.text : "";
      }
    }
    return text;
  };
  EXPECT_EQ(text_of("{c}response{s}{o}tools{s}{o}call tool=\"f\" index=\"1\"{s}"), "");
  EXPECT_EQ(text_of("{o}argument key=\"a\"b\" type=\"string\"{s}").substr(0, 4), "{\"a\"");
  EXPECT_EQ(text_of("x\"y"), "x\\\"y");
  EXPECT_EQ(text_of("ab"), "ab");
  EXPECT_EQ(text_of("\xE4\xBD"), "");
  EXPECT_EQ(text_of("\xA0"), "你");
  EXPECT_EQ(text_of("{c}argument{s}"), "\"");
  EXPECT_EQ(text_of("{o}argument key=\"n\" type=\"number\"{s}12"), ",\"n\":");
  EXPECT_EQ(text_of("{c}"), "12");
  EXPECT_EQ(text_of("argument{s}{c}call{s}"), "}");
}

struct Deviation {
  std::string script;
  Parsed expected;
};

TEST(KimiResponseParser, DeviationsAreTolerated) {
  const std::string string_call = call("f", argument("a", "string", "b"));
  const Call plain{"f", R"({"a":"b"})", true};
  const auto with = [](std::string reasoning, std::string text, std::vector<Call> calls) {
    return Parsed{std::move(reasoning), std::move(text), std::move(calls)};
  };
  const std::vector<Deviation> rows = {
      // think is not closed
      {"T{o}response{s}A{c}response{s}" + kEnd, with("T", "A", {})},
      {"T{o}tools{s}" + string_call + "{c}tools{s}" + kEnd, with("T", "", {plain})},
      {"T{o}call tool=\"f\" index=\"1\"{s}{c}call{s}", with("T", "", {{"f", "{}", true}})},
      // closes that close nothing, channels that open twice, nothing closed at all
      {"T{c}think{s}{c}think{s}{c}tools{s}" + answer("A") + kEnd, with("T", "A", {})},
      {"T{c}response{s}U{c}think{s}" + answer("A{c}think{s}B"), with("TU", "AB", {})},
      {kThought + answer("A") + answer("B"), with("I think", "AB", {})},
      {"T{c}think{s}{o}response{s}A{end}", with("T", "A", {})},
      {"T{eos}", with("T", "", {})},
      {"T{end}A", with("T", "A", {})},
      // text outside of channels
      {"T{c}think{s}A", with("T", "A", {})},
      {"T{c}think{s}\n \n{o}response{s}A{c}response{s}\n{c}message{s}\n{end}", with("T", "A", {})},
      // headers without the last marker, stray ones, torn ones
      {"T{c}think{o}response{s}A{c}response{end}", with("T", "A", {})},
      {"T{c}think{o}response A{c}response{s}", with("T", " A", {})},
      {"T{s}U{c}think{s}" + answer("A{s}B"), with("TU", "AB", {})},
      {"T{o}{c}{o}{s}U{c}think{s}{o}{o}response{s}A", with("TU", "A", {})},
      {"T{c}thi", with("T", "", {})},
      {kThought + "{o}response{s}A{c}resp", with("I think", "A", {})},
      {"T{o}strange{s}U", with("TU", "", {})},
      {"T{c}wrong {c}think{s}", with("Twrong ", "", {})},
      // calls
      {tools("{o}call tool=\"f\" index=\"1\"{s}" +
             std::string("{o}argument key=\"a\" type=\"string\"{s}b{o}call tool=\"g\" "
                         "index=\"2\"{s}{c}tools{s}")),
       with("", "", {plain, {"g", "{}", true}})},
      {tools("{o}call tool=\"f\" index=\"1\"{s}{o}argument key=\"a\" type=\"string\"{s}b{end}"),
       with("", "", {plain})},
      {"{o}call tool=\"f\" index=\"1\"{s}{o}argument key=\"a\" type=\"string\"{s}b",
       with("", "", {{"f", R"({"a":"b)", false}})},
      {"{o}call tool=\"f\" index=\"1\"{s}{o}argument key=\"a\" type=\"object\"{s}{\"b\":",
       with("", "", {{"f", R"({"a":{"b":)", false}})},
      {"{o}tools{s}{o}call tool=\"f\" ind", with("", "", {})},
      {"{o}call tool=\"f\" index=\"1\"{s}", with("", "", {})},
      // values that are not what they say
      {call("f", argument("a", "number", "three") + argument("b", "boolean", "") +
                     argument("c", "integer", "3") + argument("d", "null", "\"null\"")),
       with("", "", {{"f", R"({"a":"three","b":"","c":3,"d":"null"})", true}})},
      {call("f", "{o}argument key=\"a\"{s}b{c}argument{s}{o}argument{s}c{c}argument{s}"),
       with("", "", {{"f", R"({"a":"b","":"c"})", true}})},
      // the json form: an object, broken text, something else
      {call("f", "{o}json type=\"object\"{s} {\"a\": 1}{c}json{s}"),
       with("", "", {{"f", " {\"a\": 1}", true}})},
      {call("f", "{o}json type=\"object\"{s}{\"a\": {c}json{s}"),
       with("", "", {{"f", "{\"a\": ", true}})},
      {call("f", "{o}json type=\"object\"{s}a: 1{c}json{s}"), with("", "", {{"f", "a: 1", true}})},
      {call("f", "{o}json type=\"object\"{s}[1]{c}json{s}"), with("", "[1]", {})},
      {"{o}call tool=\"f\" index=\"1\"{s}{o}json type=\"object\"{s}\n", with("", "", {})},
      {call("f", "{o}json type=\"object\"{s}{c}json{s}"), with("", "", {{"f", "{}", true}})},
      // a call's body without any element
      {call("f", "{\"a\": 1}"), with("", "", {{"f", "{\"a\": 1}", true}})},
      {call("f", "a: 1"), with("", "a: 1", {})},
      {tools(fmt::format("\n{}\n", call("f", fmt::format("\n{}\n", argument("a", "string", "b"))))),
       with("", "", {plain})},
      {call("f", argument("a", "string", "b") + "xyz"), with("", "xyz", {plain})},
      // calls without a name are text
      {"{o}call index=\"1\"{s}" + argument("a", "string", "b") + "{c}call{s}", with("", "b", {})},
      // escapes of attributes
      {call("f&quot;&amp;quot;&amp;", ""), with("", "", {{"f\"&quot;&", "{}", true}})},
  };
  for (const Deviation& row : rows) {
    const Parsed result = parse(ids_of(row.script));
    EXPECT_EQ(result.reasoning, row.expected.reasoning) << row.script;
    EXPECT_EQ(result.answer, row.expected.answer) << row.script;
    EXPECT_EQ(result.calls, row.expected.calls) << row.script;
  }
}

TEST(KimiResponseParser, AHeaderThatNeverEndsIsText) {
  const std::string text(40'000, 'x');
  const Parsed result = parse(ids_of("T{c}think{s}{o}response" + text));
  EXPECT_EQ(result.answer, text);
}

// An answer cut anywhere is a prefix of the whole one, without a piece of any marker.
TEST(KimiResponseParser, CutAfterEveryToken) {
  const std::string script =
      kThought + answer("Hi 你") +
      tools(call("f", argument("a", "string", "x 你\"") + argument("b", "array", "[1, 2]")) +
            call("g", "{o}json type=\"object\"{s}{\"k\": 1}{c}json{s}")) +
      kEnd;
  const auto ids = ids_of(script);
  const Parsed whole = parse(ids);
  for (std::size_t length = 0; length <= ids.size(); ++length) {
    const Parsed part = parse({ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(length)});
    const auto is_prefix = [](std::string text, const std::string& of) {
      if (text.ends_with(kReplacementCharacter)) {  // a character that was cut
        text.resize(text.size() - kReplacementCharacter.size());
      }
      return of.starts_with(text);
    };
    EXPECT_TRUE(is_prefix(part.reasoning, whole.reasoning)) << part.reasoning;
    EXPECT_TRUE(is_prefix(part.answer, whole.answer)) << part.answer;
    ASSERT_LE(part.calls.size(), whole.calls.size());
    for (std::size_t i = 0; i < part.calls.size(); ++i) {
      EXPECT_EQ(part.calls[i].name, whole.calls[i].name);
      EXPECT_TRUE(is_prefix(part.calls[i].arguments, whole.calls[i].arguments))
          << part.calls[i].arguments;
      EXPECT_TRUE(!part.calls[i].complete || part.calls[i] == whole.calls[i]);
    }
  }
}

TEST(KimiResponseParser, NeverDependsOnHowTextIsCutIntoTokens) {
  const std::string script = kThought + answer("Hi 你 think a你") +
                             tools(call("f", argument("k", "string", "tools ab12 你"))) + kEnd;
  std::vector<std::int32_t> bytes;
  for (const std::int32_t id : ids_of(script)) {
    if (id >= kimi().special_id("[BOS]").value()) {
      bytes.push_back(id);
      continue;
    }
    for (const char c : kimi().token_bytes(id)) {
      bytes.push_back(testing::byte_id(c));
    }
  }
  const Parsed merged = parse(ids_of(script));
  const Parsed single = parse(bytes);
  EXPECT_EQ(single.reasoning, merged.reasoning);
  EXPECT_EQ(single.answer, merged.answer);
  EXPECT_EQ(single.calls, merged.calls);
}

// Each token's text ends in the piece that counts it.
TEST(KimiResponseParser, TokensAreCountedWithTheirText) {
  const auto parser = make_response_parser(kimi(), true);
  const auto counts = [&](std::int32_t id) {
    std::vector<std::pair<std::string, std::int64_t>> result;
    for (const ResponsePiece& piece : parser->push(id)) {
      result.emplace_back(piece.text, piece.num_tokens);
    }
    return result;
  };
  using Counts = std::vector<std::pair<std::string, std::int64_t>>;
  std::int32_t split = 0;
  while (kimi().token_bytes(split) != "a\xE4") {
    ++split;
  }
  EXPECT_EQ(counts(split), (Counts{{"a", 0}}));
  EXPECT_EQ(counts(testing::byte_id('\xBD')), (Counts{}));
  EXPECT_EQ(counts(testing::byte_id('\xA0')), (Counts{{"你", 3}}));
  EXPECT_EQ(counts(testing::byte_id('\xE4')), (Counts{}));
  EXPECT_EQ(counts(kimi().special_id("<|close|>").value()), (Counts{{"\uFFFD", 1}, {"", 1}}));
}

ChatMessage message_of(const Parsed& parsed) {
  ChatMessage message;
  message.role = ChatRole::kAssistant;
  message.reasoning = parsed.reasoning;
  message.content = {parsed.answer};
  for (const Call& one : parsed.calls) {
    message.tool_calls.push_back({"", one.name, one.arguments});
  }
  return message;
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
  EXPECT_TRUE(std::equal(prompt.begin(), prompt.end(), whole.begin()));
  return {whole.begin() + isize(prompt), whole.end()};
}

TEST(KimiResponseParser, RenderingWhatWasParsedGivesTheSameTokens) {
  Rng rng(17);
  const std::vector<std::string> texts = {
      "",        "Hi",      "a \"b\" & <|open|>", "日本 你\n",
      "{\"a\":", "&quot; ", "</think> think",     "\xF0\x9F\x8E\x89"};
  const std::vector<std::string> arguments = {
      "",
      R"({"city": "Par\"is", "days": 3})",
      R"({"a": [1, {"b": null}], "c": true, "d": -1.50, "e": {}, "f": null, "": ""})",
      R"({"key \"&": "\u00e4\n\ud83c\udf89", "big": 123456789012345678901234567890})",
      "not json",
      "{\"cut\": ",
      R"({"x": "<|close|>argument<|sep|>"})",
  };
  for (int round = 0; round < 300; ++round) {
    ChatMessage message;
    message.role = ChatRole::kAssistant;
    const bool thinking = rng.below(2) == 0;
    message.reasoning = thinking ? texts[rng.below(texts.size())] : "";
    message.content = {texts[rng.below(texts.size())]};
    for (std::uint64_t n = rng.below(4); n > 0; --n) {
      message.tool_calls.push_back(
          {"", rng.below(2) == 0 ? "get_weather" : "f\"&", arguments[rng.below(arguments.size())]});
    }
    const auto ids = output_of(message, thinking);
    const Parsed parsed = parse(ids, thinking);
    EXPECT_EQ(parsed.reasoning, message.reasoning);
    EXPECT_EQ(parsed.answer, message.content.front());
    ASSERT_EQ(parsed.calls.size(), message.tool_calls.size());
    ASSERT_EQ(output_of(message_of(parsed), thinking), ids);
  }
}

// Random tokens: nothing is lost or counted twice, complete arguments are JSON.
TEST(KimiResponseParser, AnyTokensAreTolerated) {
  Rng rng(23);
  const std::vector<std::string> parts = {"{o}",
                                          "{c}",
                                          "{s}",
                                          "{end}",
                                          "think",
                                          "response",
                                          "tools",
                                          "call",
                                          "call tool=\"f\" index=\"1\"",
                                          "argument key=\"a\" type=\"string\"",
                                          "argument key=\"b\" type=\"number\"",
                                          "json",
                                          "1",
                                          "{",
                                          "\"",
                                          " ",
                                          "message",
                                          "\xE4\xBD",
                                          "\xFF",
                                          "\n"};
  for (int round = 0; round < 3000; ++round) {
    std::string script;
    for (std::uint64_t n = rng.below(30); n > 0; --n) {
      script += parts[rng.below(parts.size())];
    }
    const Parsed result = parse(ids_of(script), rng.below(2) == 0);
    for (const Call& one : result.calls) {
      // The json form hands on what is no JSON as it is.
      if (one.complete && script.find("json") == script.npos) {
        EXPECT_TRUE(nlohmann::json::accept(one.arguments)) << script << one.arguments;
      }
    }
  }
}

TEST(PlainResponseParser, EverythingIsAnswer) {
  const auto tokenizer =
      CharTokenizer::create(
          {.tokens = {"a", "b", " "}, .special = {"<unk>", "<eos>"}, .stop = {"<eos>"}})
          .value_or_throw();
  const auto parser = make_response_parser(*tokenizer, true);
  Parsed result;
  for (const std::int32_t id : {0, 1, 4, 0}) {
    result.add(parser->push(id));
    EXPECT_EQ(parser->channel(), Channel::kAnswer);
  }
  result.add(parser->finish());
  EXPECT_EQ(result.answer, "aba");
  EXPECT_EQ(result.num_tokens, 4);
}

}  // namespace
}  // namespace tandem
