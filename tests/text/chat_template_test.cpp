#include "text/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/tiny_vocab.h"
#include "text/char_tokenizer.h"
#include "text/kimi_tokenizer.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

// Segments as one line: {open} {close} {sep} {end} for the markers, [text] for everything else.
std::string flat(const std::vector<Segment>& segments) {
  std::string out;
  for (const Segment& segment : segments) {
    EXPECT_FALSE(segment.text.empty());
    if (!segment.allow_special) {
      out += "[" + segment.text + "]";
      continue;
    }
    const std::string marker = segment.text == "<|open|>"         ? "{open}"
                               : segment.text == "<|close|>"      ? "{close}"
                               : segment.text == "<|sep|>"        ? "{sep}"
                               : segment.text == "<|end_of_msg|>" ? "{end}"
                                                                  : "";
    EXPECT_FALSE(marker.empty()) << "unexpected marker segment " << segment.text;
    out += marker;
  }
  return out;
}

std::string render(const Conversation& conversation) {
  return flat(KimiTemplate().render(conversation).value_or_throw());
}

std::string attribute(const std::string& key, const std::string& value) {
  return "[ " + key + "][=\"][" + value + "][\"]";
}
std::string message(const std::string& attributes, const std::string& body) {
  return "{open}[message]" + attributes + "{sep}" + body + "{close}[message]{sep}{end}";
}
std::string element(const std::string& tag, const std::string& body) {
  return "{open}[" + tag + "]{sep}" + body + "{close}[" + tag + "]{sep}";
}
std::string user(const std::string& text) {
  return message(attribute("role", "user"), "[" + text + "]");
}
const std::string kPromptThink =
    "{open}[message][ role][=\"][assistant][\"]{sep}{open}[think]{sep}";
const std::string kPromptResponse =
    "{open}[message][ role][=\"][assistant][\"]{sep}{open}[response]{sep}";

ChatMessage say(ChatRole role, std::string text) {
  ChatMessage result;
  result.role = role;
  result.content = {std::move(text)};
  return result;
}
ChatMessage tool_result(std::string call_id, std::string text, std::string name = "") {
  ChatMessage result = say(ChatRole::kTool, std::move(text));
  result.tool_call_id = std::move(call_id);
  result.name = std::move(name);
  return result;
}
Conversation quiet(std::vector<ChatMessage> messages) {
  Conversation conversation;
  conversation.messages = std::move(messages);
  conversation.effort.reset();
  conversation.add_generation_prompt = false;
  return conversation;
}

TEST(KimiTemplate, OneUserMessageHasTheSegmentsOfTheCheckVector) {
  Conversation conversation = quiet({say(ChatRole::kUser, "Hi")});
  EXPECT_EQ(render(conversation),
            "{open}[message][ role][=\"][user][\"]{sep}[Hi]{close}[message]{sep}{end}");
  EXPECT_EQ(KimiTemplate().render(conversation).value_or_throw().size(), 12U);
  conversation.add_generation_prompt = true;
  EXPECT_EQ(render(conversation), user("Hi") + kPromptThink);
  EXPECT_EQ(KimiTemplate().render(conversation).value_or_throw().size(), 22U);
  conversation.thinking = false;
  EXPECT_EQ(render(conversation), user("Hi") + kPromptResponse);
}

TEST(KimiTemplate, UserTextIsNeverAMarker) {
  const auto segments =
      KimiTemplate().render(quiet({say(ChatRole::kUser, "<|open|>")})).value_or_throw();
  EXPECT_EQ(segments[7], (Segment{"<|open|>", false}));
  // and no id behind the last rank comes of it, while the renderer's own markers are ids.
  BpeVocab vocab =
      BpeVocab::parse(testing::tiktoken_text(testing::tiny_vocab({})), "t").value_or_throw();
  const auto tokenizer =
      KimiTokenizer::create(std::move(vocab), KimiTokenizer::k3_specials()).value_or_throw();
  const auto ids = tokenizer->encode_segments(segments);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), tokenizer->special_id("<|open|>").value()), 1);
}

TEST(KimiTemplate, EffortMessageComesFirst) {
  Conversation conversation = quiet({say(ChatRole::kUser, "Hi")});
  const std::string body =
      "`thinking_effort` guides on how much to think in your thinking channel (not including the "
      "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
      "Now the system is invoked with `thinking_effort=";
  const auto effort = [&](const std::string& word) {
    return message(attribute("role", "system") + attribute("type", "thinking-effort"),
                   "[" + body + word + "`.]") +
           user("Hi");
  };
  for (const auto& [value, word] :
       {std::pair(ThinkingEffort::kLow, "low"), std::pair(ThinkingEffort::kHigh, "high"),
        std::pair(ThinkingEffort::kMax, "max")}) {
    conversation.effort = value;
    EXPECT_EQ(render(conversation), effort(word));
  }
  EXPECT_EQ(Conversation().effort, ThinkingEffort::kMax);
  conversation.thinking = false;
  EXPECT_EQ(render(conversation), user("Hi"));
}

TEST(KimiTemplate, ToolsStandBeforeTheEffort) {
  Conversation conversation = quiet({});
  conversation.effort = ThinkingEffort::kLow;
  conversation.tools_json = R"([{"type": "function", "function": {"name": "é", "a": [2, 1.0]}}])";
  const std::string out = render(conversation);
  const std::string tools =
      message(attribute("role", "system") + attribute("type", "tool-declare"),
              "[# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
              R"([{"function":{"a":[2,1.0],"name":"é"},"type":"function"}])"
              "\n```]");
  EXPECT_EQ(out.substr(0, tools.size()), tools);
  EXPECT_THAT(out.substr(tools.size()), HasSubstr("thinking-effort"));
}

TEST(KimiTemplate, ContentPartsAreSegmentsAndNamesAreEscaped) {
  ChatMessage from_user = say(ChatRole::kUser, "a&b \"q\"");
  from_user.content = {"a&b \"q\"", "", "c"};
  from_user.name = "A&\"<B>&amp;";
  EXPECT_EQ(render(quiet({from_user})),
            message(attribute("role", "user") + attribute("name", "A&amp;&quot;<B>&amp;amp;"),
                    "[a&b \"q\"][c]"));
  // An empty value leaves no segment behind.
  ChatMessage tool = tool_result("", "", "t");
  EXPECT_EQ(
      render(quiet({tool})),
      message(attribute("role", "tool") + attribute("tool", "t") + attribute("index", "1"), ""));
}

TEST(KimiTemplate, AssistantAlwaysHasItsThinkTags) {
  ChatMessage answer = say(ChatRole::kAssistant, "Yes");
  const std::string role = attribute("role", "assistant");
  const std::string response = element("response", "[Yes]");
  EXPECT_EQ(render(quiet({answer})), message(role, element("think", "") + response));
  answer.reasoning = " \n\u3000";
  EXPECT_EQ(render(quiet({answer})), message(role, element("think", "") + response));
  answer.reasoning = " why\n";
  EXPECT_EQ(render(quiet({answer})), message(role, element("think", "[ why\n]") + response));
  Conversation off = quiet({answer});
  off.thinking = false;
  EXPECT_EQ(render(off), message(role, response));
  // Older turns keep theirs.
  EXPECT_EQ(render(quiet({answer, say(ChatRole::kUser, "x"), answer})),
            message(role, element("think", "[ why\n]") + response) + user("x") +
                message(role, element("think", "[ why\n]") + response));
}

TEST(KimiTemplate, ToolCallsHaveTheSegmentsOfTheCheckVector) {
  ChatMessage call;
  call.role = ChatRole::kAssistant;
  call.tool_calls = {{"id1", "get_weather", R"({"city": "Paris", "days": 3})"}};
  const std::string argument_city =
      "{open}[argument][ key][=\"][city][\"][ type][=\"][string][\"]"
      "{sep}[Paris]{close}[argument]{sep}";
  const std::string argument_days =
      "{open}[argument][ key][=\"][days][\"][ type][=\"][number][\"]"
      "{sep}[3]{close}[argument]{sep}";
  EXPECT_EQ(render(quiet({call})),
            message(attribute("role", "assistant"),
                    element("think", "") + element("response", "") +
                        "{open}[tools]{sep}{open}[call][ tool][=\"][get_weather][\"]"
                        "[ index][=\"][1][\"]{sep}" +
                        argument_city + argument_days + "{close}[call]{sep}{close}[tools]{sep}"));
}

std::string call_body(const std::string& arguments) {
  ChatMessage call;
  call.role = ChatRole::kAssistant;
  call.tool_calls = {{"", "f", arguments}};
  const std::string out = render(quiet({call}));
  const std::string begin = "[ index][=\"][1][\"]{sep}";
  const std::size_t from = out.find(begin) + begin.size();
  return out.substr(from, out.find("{close}[call]") - from);
}
std::string argument(const std::string& key, const std::string& type, const std::string& body) {
  return "{open}[argument]" + attribute("key", key) + attribute("type", type) + "{sep}" + body +
         "{close}[argument]{sep}";
}

TEST(KimiTemplate, ArgumentsKeepOrderTypesAndSpelling) {
  EXPECT_EQ(
      call_body(
          R"({"z": true, "y": null, "s": "a \"b\"\n", "e": "", "é\"": {"b":[1,2.0],"a":"ü"}, "l": []})"),
      argument("z", "boolean", "[true]") + argument("y", "null", "[null]") +
          argument("s", "string", "[a \"b\"\n]") + argument("e", "string", "") +
          argument("é&quot;", "object", R"([{"b": [1, 2.0], "a": "ü"}])") +
          argument("l", "array", "[[]]"));
  EXPECT_EQ(call_body(""), "");
  EXPECT_EQ(call_body("{}"), "");
  EXPECT_EQ(call_body("{\"a\": <|open|>"), "{open}[json]" + attribute("type", "object") +
                                               "{sep}[{\"a\": <|open|>]{close}[json]{sep}");
}

TEST(KimiTemplate, ArgumentsThatAreNoObjectAreRefused) {
  ChatMessage call;
  call.role = ChatRole::kAssistant;
  call.tool_calls = {{"", "f", "{}"}, {"", "g", "[1]"}};
  const auto out = KimiTemplate().render(quiet({say(ChatRole::kUser, "x"), call}));
  ASSERT_FALSE(out.ok());
  EXPECT_EQ(out.message(),
            "messages[1].tool_calls[1].arguments: expected a JSON object, got array");
}

// The part of the prompt behind the assistant's calls a, b, c (ids A, B, C).
std::string results(std::vector<ChatMessage> messages) {
  ChatMessage call;
  call.role = ChatRole::kAssistant;
  call.tool_calls = {{"A", "a", ""}, {"B", "b", ""}, {"C", "c", ""}};
  const std::size_t prefix = render(quiet({call})).size();
  messages.insert(messages.begin(), call);
  return render(quiet(std::move(messages))).substr(prefix);
}
std::string result(const std::string& tool, const std::string& index, const std::string& text) {
  return message(attribute("role", "tool") + attribute("tool", tool) + attribute("index", index),
                 "[" + text + "]");
}

TEST(KimiTemplate, ToolResultsFollowTheOrderOfTheCalls) {
  EXPECT_EQ(results({tool_result("C", "3", "wrong"), tool_result("A", "1"), tool_result("B", "2")}),
            result("a", "1", "1") + result("b", "2", "2") + result("c", "3", "3"));
  EXPECT_EQ(results({tool_result("B", "2"), tool_result("A", "1")}),
            result("a", "1", "1") + result("b", "2", "2"));
}

TEST(KimiTemplate, OneUnmatchedResultKeepsTheWholeRunInItsOrder) {
  EXPECT_EQ(results({tool_result("C", "3"), tool_result("X", "?", "x"), tool_result("A", "1")}),
            result("c", "1", "3") + result("x", "2", "?") + result("a", "3", "1"));
  EXPECT_EQ(results({tool_result("C", "3"), tool_result("", "?", "x"), tool_result("A", "1")}),
            result("c", "1", "3") + result("x", "2", "?") + result("a", "3", "1"));
}

TEST(KimiTemplate, RunsAreSortedOneByOneAndCountedTogether) {
  EXPECT_EQ(results({tool_result("C", "3"), tool_result("B", "2"), say(ChatRole::kUser, "u"),
                     tool_result("A", "1")}),
            result("b", "1", "2") + result("c", "2", "3") + user("u") + result("a", "3", "1"));
}

TEST(KimiTemplate, ANewAssistantMessageStartsTheCountAgain) {
  const std::string out = results(
      {tool_result("A", "1"), say(ChatRole::kAssistant, "ok"), tool_result("B", "2", "own")});
  EXPECT_THAT(out, HasSubstr(result("own", "1", "2")));  // B was a call of the message before
}

TEST(KimiTemplate, AToolResultNeedsAName) {
  const auto out = KimiTemplate().render(quiet({say(ChatRole::kUser, "x"), tool_result("Z", "1")}));
  ASSERT_FALSE(out.ok());
  EXPECT_THAT(out.message(), HasSubstr("messages[1]: a tool result needs a name"));
}

TEST(KimiTemplate, SystemMessagesAndLaterTools) {
  ChatMessage later = say(ChatRole::kSystem, "ignored");
  later.tools_json = R"([{"b":1,"a":2}])";
  EXPECT_EQ(render(quiet({say(ChatRole::kSystem, "Be kind."), later})),
            message(attribute("role", "system"), "[Be kind.]") +
                message(attribute("role", "system") + attribute("type", "tool-declare"),
                        "[## New Tools Available\n"
                        "The system dynamically extends the toolset via lazy-loading.\n"
                        "You have access to all existing and extended tools.\n"
                        "Here are the specs for the extended tools.\n\n"
                        "```json\n[{\"a\":2,\"b\":1}]\n```]"));
}

TEST(KimiTemplate, ChoiceAndFormatStandBehindTheMessages) {
  Conversation conversation = quiet({say(ChatRole::kUser, "Hi")});
  conversation.add_generation_prompt = true;
  conversation.tool_choice = ToolChoice::kRequired;
  conversation.response_format = ResponseFormat::kJsonObject;
  const auto system = [](const std::string& type, const std::string& body) {
    return message(attribute("role", "system") + attribute("type", type), "[" + body + "]");
  };
  const std::string raw =
      "Your response must be raw JSON data without markdown code blocks (```json) or any "
      "additional formatting.";
  EXPECT_EQ(render(conversation),
            user("Hi") +
                system("tool-choice",
                       "The system is invoked with `tool_choice=required`.\n"
                       "You MUST call tools in the next message.") +
                system("response-format",
                       "The system is invoked with `response_format=json_object`.\n" + raw) +
                kPromptThink);
  conversation.tool_choice = ToolChoice::kNone;
  conversation.response_format = ResponseFormat::kJsonSchema;
  conversation.response_schema_json = R"({"type": "object", "properties": {}})";
  EXPECT_EQ(render(conversation),
            user("Hi") +
                system("tool-choice",
                       "The system is invoked with `tool_choice=none`.\n"
                       "You MUST NOT call any tools in the next message.") +
                system("response-format",
                       "The system is invoked with `response_format=json_schema`.\n" + raw +
                           "\nThe JSON data must match the following schema:\n```json\n"
                           "{\"properties\":{},\"type\":\"object\"}\n```") +
                kPromptThink);
  conversation.response_schema_json = "{";
  EXPECT_THAT(KimiTemplate().render(conversation).message(), HasSubstr("response_format schema"));
}

TEST(PlainTemplate, QuestionAndNewline) {
  const PlainTemplate plain("<eos>");
  const auto segments = plain.render(quiet({say(ChatRole::kUser, "1+1?")})).value_or_throw();
  EXPECT_EQ(segments, (std::vector<Segment>{{"1+1?\n", false}}));
  const auto turns =
      plain
          .render(quiet({say(ChatRole::kUser, "a"), say(ChatRole::kAssistant, "<eos>"),
                         say(ChatRole::kUser, "b")}))
          .value_or_throw();
  EXPECT_EQ(turns, (std::vector<Segment>{
                       {"a\n", false}, {"<eos>", false}, {"<eos>", true}, {"b\n", false}}));
  EXPECT_EQ(PlainTemplate("").render(quiet({say(ChatRole::kAssistant, "x")})).value_or_throw(),
            (std::vector<Segment>{{"x\n", false}}));
}

TEST(PlainTemplate, RefusesWhatItCannotExpress) {
  const PlainTemplate plain("<eos>");
  Conversation tools = quiet({});
  tools.tools_json = "[{}]";
  EXPECT_FALSE(plain.render(tools).ok());
  Conversation format = quiet({});
  format.response_format = ResponseFormat::kJsonObject;
  EXPECT_FALSE(plain.render(format).ok());
  EXPECT_THAT(plain.render(quiet({tool_result("A", "1")})).message(), HasSubstr("messages[0]"));
}

TEST(MakeChatTemplate, FollowsTheTokenizer) {
  BpeVocab vocab =
      BpeVocab::parse(testing::tiktoken_text(testing::tiny_vocab({})), "t").value_or_throw();
  const auto kimi =
      KimiTokenizer::create(std::move(vocab), KimiTokenizer::k3_specials()).value_or_throw();
  const auto chars =
      CharTokenizer::create({.tokens = {"a"}, .special = {"<unk>", "<eos>"}, .stop = {"<eos>"}})
          .value_or_throw();
  const Conversation conversation = quiet({say(ChatRole::kAssistant, "a")});
  EXPECT_EQ(flat(make_chat_template(*kimi)->render(conversation).value_or_throw()),
            render(conversation));
  EXPECT_EQ(make_chat_template(*chars)->render(conversation).value_or_throw(),
            (std::vector<Segment>{{"a", false}, {"<eos>", true}}));
}

}  // namespace
}  // namespace tandem
