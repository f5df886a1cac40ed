#include "text/chat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Conversation parse(std::string_view text) {
  return parse_conversation(text).value_or_throw();
}

std::string with_message(const std::string& fields) {
  return "{\"messages\": [{" + fields + "}]}";
}

std::string with_field(const std::string& field) {
  return "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], " + field + "}";
}

TEST(ParseConversation, ReadsEveryFieldOfAMessage) {
  const Conversation conversation = parse(R"({"model": "k3", "temperature": 1, "messages": [
      {"role": "developer", "content": "be kind", "name": null},
      {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]},
      {"role": "assistant", "content": null, "reasoning": "r", "tool_calls": [
          {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1.0}"}},
          {"function": {"name": "g", "arguments": {"b": 12345678901234567890123, "a": 2}}},
          {"function": {"name": "h"}}]},
      {"role": "tool", "tool_call_id": "1", "name": "f", "content": "4"},
      {"role": "system", "tools": [{"b": 1}]},
      {"role": "assistant", "content": "ok", "reasoning_content": "first", "reasoning": "second"}]})");
  ASSERT_EQ(conversation.messages.size(), 6U);
  const auto& m = conversation.messages;
  EXPECT_EQ(m[0].role, ChatRole::kSystem);
  EXPECT_THAT(m[0].content, ElementsAre("be kind"));
  EXPECT_THAT(m[1].content, ElementsAre("a", ""));
  EXPECT_THAT(m[2].content, ElementsAre());
  EXPECT_EQ(m[2].reasoning, "r");
  ASSERT_EQ(m[2].tool_calls.size(), 3U);
  EXPECT_EQ(m[2].tool_calls[0].id, "1");
  EXPECT_EQ(m[2].tool_calls[0].arguments, "{\"x\":1.0}");
  EXPECT_EQ(m[2].tool_calls[1].arguments, "{\"b\": 12345678901234567890123, \"a\": 2}");
  EXPECT_EQ(m[2].tool_calls[2].arguments, "");
  EXPECT_EQ(m[3].role, ChatRole::kTool);
  EXPECT_EQ(m[3].tool_call_id, "1");
  EXPECT_EQ(m[3].name, "f");
  EXPECT_EQ(m[4].tools_json, "[{\"b\": 1}]");
  EXPECT_EQ(m[5].reasoning, "first");
}

TEST(ParseConversation, DefaultsAreTheTokenizersOwn) {
  const Conversation conversation = parse(with_message(R"("role": "user", "content": "x")"));
  EXPECT_TRUE(conversation.thinking);
  EXPECT_EQ(conversation.effort, ThinkingEffort::kMax);
  EXPECT_EQ(conversation.tool_choice, ToolChoice::kAuto);
  EXPECT_EQ(conversation.response_format, ResponseFormat::kText);
  EXPECT_TRUE(conversation.tools_json.empty());
  EXPECT_TRUE(conversation.add_generation_prompt);
}

TEST(ParseConversation, EffortWordsAreMapped) {
  const std::pair<const char*, ThinkingEffort> words[] = {
      {"minimal", ThinkingEffort::kLow}, {"low", ThinkingEffort::kLow},
      {"medium", ThinkingEffort::kHigh}, {"high", ThinkingEffort::kHigh},
      {"xhigh", ThinkingEffort::kMax},   {"max", ThinkingEffort::kMax}};
  for (const auto& [word, effort] : words) {
    EXPECT_EQ(parse(with_field(fmt::format("\"reasoning_effort\": \"{}\"", word))).effort, effort);
    const Conversation by_kwargs = parse(
        with_field(fmt::format("\"chat_template_kwargs\": {{\"thinking_effort\": \"{}\"}}", word)));
    EXPECT_EQ(by_kwargs.effort, effort);
    EXPECT_TRUE(by_kwargs.thinking);
  }
  EXPECT_EQ(parse(with_field("\"reasoning_effort\": null")).effort, std::nullopt);
  EXPECT_FALSE(parse(with_field("\"reasoning_effort\": \"none\"")).thinking);
  EXPECT_FALSE(parse(with_field("\"chat_template_kwargs\": {\"thinking\": false}")).thinking);
  EXPECT_FALSE(
      parse(with_field("\"chat_template_kwargs\": {\"enable_thinking\": false}")).thinking);
}

TEST(ParseConversation, ToolsChoiceAndFormat) {
  EXPECT_EQ(parse(with_field("\"tools\": []")).tools_json, "");
  EXPECT_EQ(parse(with_field("\"tools\": [{\"b\": 1, \"a\": 2}]")).tools_json,
            "[{\"b\": 1, \"a\": 2}]");
  EXPECT_EQ(parse(with_field("\"tool_choice\": \"required\"")).tool_choice, ToolChoice::kRequired);
  EXPECT_EQ(parse(with_field("\"tool_choice\": \"none\"")).tool_choice, ToolChoice::kNone);
  EXPECT_EQ(parse(with_field(R"("response_format": {"type": "json_object"})")).response_format,
            ResponseFormat::kJsonObject);
  const Conversation schema = parse(with_field(
      R"("response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"x": 1}}})"));
  EXPECT_EQ(schema.response_format, ResponseFormat::kJsonSchema);
  EXPECT_EQ(schema.response_schema_json, "{\"x\": 1}");
  EXPECT_FALSE(parse(with_field("\"add_generation_prompt\": false")).add_generation_prompt);
}

TEST(ParseConversation, BadRequestsNameTheField) {
  const std::pair<std::string, const char*> cases[] = {
      {"{", "request: not JSON"},
      {"[]", "messages: expected a non-empty list"},
      {"{\"messages\": []}", "messages: expected a non-empty list"},
      {"{\"messages\": [1]}", "messages[0]: expected an object, got number"},
      {with_message(R"("content": "x")"), "messages[0]: role: expected"},
      {with_message(R"("role": "User")"), "got \"User\""},
      {with_message(R"("role": "user", "content": 1)"), "messages[0]: content: expected a string"},
      {with_message(R"("role": "user", "content": [{"type": "text", "text": "a"},
          {"type": "image_url"}])"),
       "messages[0]: content[1]"},
      {with_message(R"("role": "user", "content": "x", "name": 1)"), "name: expected a string"},
      {with_message(R"("role": "assistant", "tool_calls": {})"), "tool_calls: expected a list"},
      {with_message(R"("role": "assistant", "tool_calls": [{}])"), "tool_calls[0].function"},
      {with_message(R"("role": "assistant", "tool_calls": [{"function": {}}])"),
       "tool_calls[0].function.name"},
      {with_message(R"("role": "system", "tools": {})"), "tools: expected a list"},
      {with_field("\"tools\": {}"), "tools: expected a list, got object"},
      {with_field("\"tool_choice\": {\"type\": \"function\"}"), "tool_choice: expected"},
      {with_field("\"tool_choice\": \"any\""), "tool_choice: expected"},
      {with_field("\"response_format\": {\"type\": \"xml\"}"), "response_format.type: expected"},
      {with_field("\"response_format\": {\"type\": \"json_schema\"}"), "json_schema.schema"},
      {with_field("\"reasoning_effort\": \"huge\""), "reasoning_effort: expected"},
      {with_field("\"reasoning_effort\": 3"), "reasoning_effort: expected"},
      {with_field("\"chat_template_kwargs\": {\"thinking\": 1}"), "chat_template_kwargs.thinking"},
      {with_field("\"chat_template_kwargs\": {\"x\": 1}"), "unknown field \"x\""},
      {with_field("\"add_generation_prompt\": 1"), "add_generation_prompt: expected"},
  };
  for (const auto& [text, message] : cases) {
    const auto conversation = parse_conversation(text);
    ASSERT_FALSE(conversation.ok()) << text;
    EXPECT_THAT(conversation.message(), HasSubstr(message)) << text;
  }
}

}  // namespace
}  // namespace tandem
