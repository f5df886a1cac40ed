// chat.h — a conversation as the chat templates take it. JSON stays text here: tool declarations
// and arguments must reach the prompt with the spelling that they came with.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace tandem {

enum class ChatRole { kSystem, kUser, kAssistant, kTool };

/// "system", "user", "assistant", "tool".
[[nodiscard]] std::string_view chat_role_name(ChatRole role);

struct ToolCall {
  std::string id;         ///< what a tool message's tool_call_id refers to; may be empty
  std::string name;       ///< of the function
  std::string arguments;  ///< JSON text of an object; empty = no arguments
};

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::vector<std::string> content;  ///< text parts in order; a plain string is one part
  std::string name;                  ///< of the speaker, or of the tool; empty = none
  std::string reasoning;             ///< assistant only: the text of its think channel
  std::vector<ToolCall> tool_calls;  ///< assistant only
  std::string tool_call_id;          ///< tool only
  std::string tools_json;            ///< system only: a JSON list of further tools; empty = none
};

enum class ThinkingEffort { kLow, kHigh, kMax };
enum class ToolChoice { kAuto, kNone, kRequired };
enum class ResponseFormat { kText, kJsonObject, kJsonSchema };

struct Conversation {
  std::vector<ChatMessage> messages;
  std::string tools_json;  ///< JSON list of tools, as in an OpenAI request; empty = none
  bool thinking = true;
  std::optional<ThinkingEffort> effort = ThinkingEffort::kMax;  ///< none: the model is not told
  ToolChoice tool_choice = ToolChoice::kAuto;
  ResponseFormat response_format = ResponseFormat::kText;
  std::string response_schema_json;   ///< with kJsonSchema: the schema
  bool add_generation_prompt = true;  ///< end with the opening of the assistant's turn
};

/// Reads the fields of an OpenAI chat request that shape the prompt: messages, tools, tool_choice,
/// response_format, reasoning_effort, chat_template_kwargs (thinking or enable_thinking,
/// thinking_effort) and add_generation_prompt. Other fields belong to the caller and are ignored.
/// reasoning_effort: null = not told; none = no thinking; minimal, low -> low; medium, high ->
/// high; xhigh, max -> max. Errors: a Failure naming the field and what was expected.
[[nodiscard]] Expected<Conversation> parse_conversation(std::string_view request_json);

}  // namespace tandem
