#include "text/chat.h"

#include <utility>

#include "core/check.h"
#include "text/json_text.h"

namespace tandem {
namespace {

// The member, or nullptr when it is missing or null: OpenAI clients send null for "not set".
const JsonNode* find_set(const JsonNode& object, std::string_view key) {
  const JsonNode* node = object.find(key);
  return node == nullptr || node->is(JsonKind::kNull) ? nullptr : node;
}

Expected<std::string> string_field(const JsonNode& object, std::string_view key) {
  const JsonNode* node = find_set(object, key);
  if (node == nullptr) {
    return std::string();
  }
  if (!node->is(JsonKind::kString)) {
    return fail("{}: expected a string, got {}", key, json_kind_name(node->kind));
  }
  return node->text;
}

Expected<bool> bool_field(const JsonNode& object, std::string_view key, bool missing) {
  const JsonNode* node = find_set(object, key);
  if (node == nullptr) {
    return missing;
  }
  if (!node->is(JsonKind::kBoolean)) {
    return fail("{}: expected true or false, got {}", key, json_kind_name(node->kind));
  }
  return node->is_true();
}

// A list as JSON text; empty when it is missing or has no items.
Expected<std::string> list_text(const JsonNode& object, std::string_view key) {
  const JsonNode* node = find_set(object, key);
  if (node == nullptr) {
    return std::string();
  }
  if (!node->is(JsonKind::kArray)) {
    return fail("{}: expected a list, got {}", key, json_kind_name(node->kind));
  }
  return node->items.empty() ? std::string() : dump_json(*node, JsonStyle::kSpaced);
}

Expected<ChatRole> parse_role(const JsonNode& message) {
  const auto role = string_field(message, "role");
  if (!role) {
    return role.failure();
  }
  if (*role == "system" || *role == "developer") {
    return ChatRole::kSystem;
  }
  for (const ChatRole known : {ChatRole::kUser, ChatRole::kAssistant, ChatRole::kTool}) {
    if (*role == chat_role_name(known)) {
      return known;
    }
  }
  return fail("role: expected system, user, assistant or tool, got \"{}\"", *role);
}

Expected<std::vector<std::string>> parse_content(const JsonNode& message) {
  const JsonNode* content = find_set(message, "content");
  std::vector<std::string> parts;
  if (content == nullptr) {
    return parts;
  }
  if (content->is(JsonKind::kString)) {
    parts.push_back(content->text);
    return parts;
  }
  if (!content->is(JsonKind::kArray)) {
    return fail("content: expected a string or a list of parts, got {}",
                json_kind_name(content->kind));
  }
  for (const JsonNode& item : content->items) {
    const JsonNode* type = item.find("type");
    const JsonNode* text = item.find("text");
    if (type == nullptr || type->text != "text" || text == nullptr ||
        !text->is(JsonKind::kString)) {
      return fail(
          "content[{}]: expected {{\"type\": \"text\", \"text\": ...}}, other parts are "
          "not supported",
          parts.size());
    }
    parts.push_back(text->text);
  }
  return parts;
}

Expected<ToolCall> parse_tool_call(const JsonNode& node) {
  const JsonNode* function = node.find("function");
  if (function == nullptr || !function->is(JsonKind::kObject)) {
    return fail("function: expected an object");
  }
  auto id = string_field(node, "id");
  auto name = string_field(*function, "name");
  for (const auto* field : {&id, &name}) {
    if (!*field) {
      return field->failure();
    }
  }
  if (name->empty()) {
    return fail("function.name: expected a name");
  }
  ToolCall call{std::move(*id), std::move(*name), ""};
  const JsonNode* arguments = find_set(*function, "arguments");
  if (arguments != nullptr) {  // text by the protocol, but some clients send the object itself
    call.arguments = arguments->is(JsonKind::kString) ? arguments->text
                                                      : dump_json(*arguments, JsonStyle::kSpaced);
  }
  return call;
}

Expected<std::vector<ToolCall>> parse_tool_calls(const JsonNode& message) {
  std::vector<ToolCall> calls;
  const JsonNode* list = find_set(message, "tool_calls");
  if (list == nullptr) {
    return calls;
  }
  if (!list->is(JsonKind::kArray)) {
    return fail("tool_calls: expected a list, got {}", json_kind_name(list->kind));
  }
  for (const JsonNode& node : list->items) {
    auto call = parse_tool_call(node);
    if (!call) {
      return fail("tool_calls[{}].{}", calls.size(), call.message());
    }
    calls.push_back(std::move(*call));
  }
  return calls;
}

Expected<ChatMessage> parse_message(const JsonNode& node) {
  if (!node.is(JsonKind::kObject)) {
    return fail("expected an object, got {}", json_kind_name(node.kind));
  }
  const auto role = parse_role(node);
  if (!role) {
    return role.failure();
  }
  auto content = parse_content(node);
  if (!content) {
    return content.failure();
  }
  auto calls = parse_tool_calls(node);
  if (!calls) {
    return calls.failure();
  }
  const std::string_view reasoning_key =
      find_set(node, "reasoning_content") != nullptr ? "reasoning_content" : "reasoning";
  ChatMessage message{.role = *role,
                      .content = std::move(*content),
                      .name = {},
                      .reasoning = {},
                      .tool_calls = std::move(*calls),
                      .tool_call_id = {},
                      .tools_json = {}};
  for (const auto& [key, target] :
       {std::pair(std::string_view("name"), &message.name),
        std::pair(reasoning_key, &message.reasoning),
        std::pair(std::string_view("tool_call_id"), &message.tool_call_id)}) {
    auto value = string_field(node, key);
    if (!value) {
      return value.failure();
    }
    *target = std::move(*value);
  }
  auto tools = list_text(node, "tools");
  if (!tools) {
    return tools.failure();
  }
  message.tools_json = std::move(*tools);
  return message;
}

// Sets thinking and effort from a word; both spellings of the field share it.
Status apply_effort(Conversation& conversation, std::string_view key, const JsonNode* node) {
  if (node == nullptr) {
    return Ok{};
  }
  if (node->is(JsonKind::kNull)) {
    conversation.effort.reset();
    return Ok{};
  }
  const std::string_view word = node->is(JsonKind::kString) ? node->text : std::string_view();
  if (word == "none") {
    conversation.thinking = false;
  } else if (word == "minimal" || word == "low") {
    conversation.effort = ThinkingEffort::kLow;
  } else if (word == "medium" || word == "high") {
    conversation.effort = ThinkingEffort::kHigh;
  } else if (word == "xhigh" || word == "max") {
    conversation.effort = ThinkingEffort::kMax;
  } else {
    return fail("{}: expected none, minimal, low, medium, high, xhigh, max or null, got {}", key,
                dump_json(*node, JsonStyle::kSpaced));
  }
  return Ok{};
}

Status apply_template_kwargs(Conversation& conversation, const JsonNode& request) {
  const JsonNode* kwargs = find_set(request, "chat_template_kwargs");
  if (kwargs == nullptr) {
    return Ok{};
  }
  if (!kwargs->is(JsonKind::kObject)) {
    return fail("chat_template_kwargs: expected an object, got {}", json_kind_name(kwargs->kind));
  }
  for (const JsonMember& member : kwargs->members) {
    if (member.key == "thinking" || member.key == "enable_thinking") {
      const auto thinking = bool_field(*kwargs, member.key, conversation.thinking);
      if (!thinking) {
        return fail("chat_template_kwargs.{}", thinking.message());
      }
      conversation.thinking = *thinking;
    } else if (member.key == "thinking_effort") {
      const auto status = apply_effort(conversation, "thinking_effort", &member.value);
      if (!status) {
        return fail("chat_template_kwargs.{}", status.message());
      }
    } else {
      return fail("chat_template_kwargs: unknown field \"{}\"", member.key);
    }
  }
  return Ok{};
}

Status apply_tool_choice(Conversation& conversation, const JsonNode& request) {
  const JsonNode* choice = find_set(request, "tool_choice");
  const std::string_view word = choice == nullptr               ? std::string_view("auto")
                                : choice->is(JsonKind::kString) ? std::string_view(choice->text)
                                                                : std::string_view();
  if (word == "auto") {
    conversation.tool_choice = ToolChoice::kAuto;
  } else if (word == "none") {
    conversation.tool_choice = ToolChoice::kNone;
  } else if (word == "required") {
    conversation.tool_choice = ToolChoice::kRequired;
  } else {
    return fail("tool_choice: expected \"auto\", \"none\" or \"required\", got {}",
                dump_json(*choice, JsonStyle::kSpaced));
  }
  return Ok{};
}

Status apply_response_format(Conversation& conversation, const JsonNode& request) {
  const JsonNode* format = find_set(request, "response_format");
  if (format == nullptr) {
    return Ok{};
  }
  const JsonNode* type = format->find("type");
  const std::string_view word = type == nullptr ? std::string_view() : type->text;
  if (word == "text") {
    conversation.response_format = ResponseFormat::kText;
  } else if (word == "json_object") {
    conversation.response_format = ResponseFormat::kJsonObject;
  } else if (word == "json_schema") {
    const JsonNode* outer = format->find("json_schema");
    const JsonNode* schema = outer == nullptr ? nullptr : outer->find("schema");
    if (schema == nullptr) {
      return fail("response_format.json_schema.schema: expected a JSON schema");
    }
    conversation.response_format = ResponseFormat::kJsonSchema;
    conversation.response_schema_json = dump_json(*schema, JsonStyle::kSpaced);
  } else {
    return fail("response_format.type: expected text, json_object or json_schema");
  }
  return Ok{};
}

}  // namespace

std::string_view chat_role_name(ChatRole role) {
  switch (role) {
    case ChatRole::kSystem:
      return "system";
    case ChatRole::kUser:
      return "user";
    case ChatRole::kAssistant:
      return "assistant";
    case ChatRole::kTool:
      return "tool";
  }
  TDM_CHECK(false);
}

Expected<Conversation> parse_conversation(std::string_view request_json) {
  const auto request = parse_json(request_json);
  if (!request) {
    return fail("request: {}", request.message());
  }
  const JsonNode* messages = request->find("messages");
  if (messages == nullptr || !messages->is(JsonKind::kArray) || messages->items.empty()) {
    return fail("messages: expected a non-empty list");
  }
  Conversation conversation;
  for (const JsonNode& node : messages->items) {
    auto message = parse_message(node);
    if (!message) {
      return fail("messages[{}]: {}", conversation.messages.size(), message.message());
    }
    conversation.messages.push_back(std::move(*message));
  }
  auto tools = list_text(*request, "tools");
  if (!tools) {
    return tools.failure();
  }
  conversation.tools_json = std::move(*tools);
  const auto generation_prompt = bool_field(*request, "add_generation_prompt", true);
  if (!generation_prompt) {
    return generation_prompt.failure();
  }
  conversation.add_generation_prompt = *generation_prompt;
  for (const Status& status :
       {apply_effort(conversation, "reasoning_effort", request->find("reasoning_effort")),
        apply_template_kwargs(conversation, *request), apply_tool_choice(conversation, *request),
        apply_response_format(conversation, *request)}) {
    if (!status) {
      return status.failure();
    }
  }
  return conversation;
}

}  // namespace tandem
