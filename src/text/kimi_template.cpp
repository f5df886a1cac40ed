// The layout follows the reference renderer, which is code and not a Jinja template; K3 has none.
#include <algorithm>
#include <span>
#include <utility>

#include "core/check.h"
#include "core/checked_cast.h"
#include "text/chat_template.h"
#include "text/json_text.h"
#include "text/kimi_markers.h"
#include "text/utf8.h"

namespace tandem {
namespace {

struct Attribute {
  std::string key;
  std::string value;
};

// Grows the list of segments; text never merges with its neighbours, empty text leaves no trace.
class SegmentWriter {
 public:
  void marker(std::string_view token) { segments_.push_back({std::string(token), true}); }
  void text(std::string_view text) {
    if (!text.empty()) {
      segments_.push_back({std::string(text), false});
    }
  }
  void open(std::string_view tag, const std::vector<Attribute>& attributes = {}) {
    marker("<|open|>");
    text(tag);
    for (const Attribute& attribute : attributes) {
      text(" " + attribute.key);
      text("=\"");
      text(escape_attribute(attribute.value));
      text("\"");
    }
    marker("<|sep|>");
  }
  void close(std::string_view tag) {
    marker("<|close|>");
    text(tag);
    marker("<|sep|>");
  }
  void close_message() {
    close("message");
    marker("<|end_of_msg|>");
  }
  void system_message(std::string_view type, std::string_view body) {
    open("message", {{"role", "system"}, {"type", std::string(type)}});
    text(body);
    close_message();
  }
  std::vector<Segment> take() { return std::move(segments_); }

 private:
  std::vector<Segment> segments_;
};

Expected<std::string> compact(const std::string& json_text, std::string_view field) {
  const auto node = parse_json(json_text);
  if (!node) {
    return fail("{}: {}", field, node.message());
  }
  return dump_json(*node, JsonStyle::kCompactSorted);
}

std::string tools_body(const std::string& json) {
  return "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n" + json +
         "\n```";
}

std::string new_tools_body(const std::string& json) {
  return "## New Tools Available\n"
         "The system dynamically extends the toolset via lazy-loading.\n"
         "You have access to all existing and extended tools.\n"
         "Here are the specs for the extended tools.\n\n```json\n" +
         json + "\n```";
}

std::string effort_body(ThinkingEffort effort) {
  const std::string_view word = effort == ThinkingEffort::kLow    ? "low"
                                : effort == ThinkingEffort::kHigh ? "high"
                                                                  : "max";
  // "medium" is named although the model was never run with it: the text is part of the format.
  return fmt::format(
      "`thinking_effort` guides on how much to think in your thinking channel (not including the "
      "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
      "Now the system is invoked with `thinking_effort={}`.",
      word);
}

constexpr std::string_view kRequiredBody =
    "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.";
constexpr std::string_view kNoToolsBody =
    "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.";

std::string format_body(std::string_view format) {
  return fmt::format(
      "The system is invoked with `response_format={}`.\n"
      "Your response must be raw JSON data without markdown code blocks (```json) or any "
      "additional formatting.",
      format);
}

Status write_arguments(SegmentWriter& out, const std::string& arguments) {
  if (arguments.empty()) {
    return Ok{};
  }
  const auto parsed = parse_json(arguments);
  if (!parsed) {  // what a model wrote may be broken; the reference keeps it as it is
    out.open("json", {{"type", "object"}});
    out.text(arguments);
    out.close("json");
    return Ok{};
  }
  if (!parsed->is(JsonKind::kObject)) {
    return fail("arguments: expected a JSON object, got {}", json_kind_name(parsed->kind));
  }
  for (const JsonMember& member : parsed->members) {
    const JsonNode& value = member.value;
    out.open("argument", {{"key", member.key}, {"type", std::string(json_kind_name(value.kind))}});
    out.text(value.is(JsonKind::kString) ? value.text : dump_json(value, JsonStyle::kSpaced));
    out.close("argument");
  }
  return Ok{};
}

std::vector<Attribute> role_attributes(const ChatMessage& message) {
  std::vector<Attribute> attributes{{"role", std::string(chat_role_name(message.role))}};
  if (!message.name.empty()) {
    attributes.push_back({"name", message.name});
  }
  return attributes;
}

void write_content(SegmentWriter& out, const ChatMessage& message) {
  for (const std::string& part : message.content) {
    out.text(part);
  }
}

Status write_system_or_user(SegmentWriter& out, const ChatMessage& message) {
  std::vector<Attribute> attributes = role_attributes(message);
  if (message.role == ChatRole::kSystem && !message.tools_json.empty()) {
    const auto tools = compact(message.tools_json, "tools");
    if (!tools) {
      return tools.failure();
    }
    attributes.push_back({"type", "tool-declare"});
    out.open("message", attributes);
    out.text(new_tools_body(*tools));
  } else {
    out.open("message", attributes);
    write_content(out, message);
  }
  out.close_message();
  return Ok{};
}

Status write_assistant(SegmentWriter& out, const ChatMessage& message, bool thinking) {
  out.open("message", role_attributes(message));
  if (thinking) {
    out.open("think");
    if (!is_blank(message.reasoning)) {
      out.text(message.reasoning);
    }
    out.close("think");
  }
  out.open("response");
  write_content(out, message);
  out.close("response");
  if (!message.tool_calls.empty()) {
    out.open("tools");
    for (std::size_t i = 0; i < message.tool_calls.size(); ++i) {
      const ToolCall& call = message.tool_calls[i];
      out.open("call", {{"tool", call.name}, {"index", std::to_string(i + 1)}});
      if (const Status status = write_arguments(out, call.arguments); !status) {
        return fail("tool_calls[{}].{}", i, status.message());
      }
      out.close("call");
    }
    out.close("tools");
  }
  out.close_message();
  return Ok{};
}

// A tool message with its place in the list of calls it answers; none when no call has its id.
struct ToolResult {
  const ChatMessage* message = nullptr;
  std::optional<std::size_t> call;
  std::size_t message_idx = 0;
};

std::vector<ToolResult> order_results(std::span<const ChatMessage> run, std::size_t first_idx,
                                      const std::vector<ToolCall>& calls) {
  std::vector<ToolResult> results;
  bool all_match = true;
  for (const ChatMessage& message : run) {
    const auto call = std::find_if(calls.begin(), calls.end(), [&](const ToolCall& candidate) {
      return !candidate.id.empty() && candidate.id == message.tool_call_id;
    });
    std::optional<std::size_t> place;
    if (call != calls.end()) {
      place = static_cast<std::size_t>(call - calls.begin());
    }
    all_match = all_match && place.has_value();
    results.push_back({&message, place, first_idx + results.size()});
  }
  if (all_match) {
    std::stable_sort(results.begin(), results.end(),
                     [](const ToolResult& a, const ToolResult& b) { return *a.call < *b.call; });
  }
  return results;
}

// Renders the messages in order and remembers what tool results need: the calls they answer.
class MessageRenderer {
 public:
  MessageRenderer(SegmentWriter& out, bool thinking) : out_(out), thinking_(thinking) {}

  Status render(std::span<const ChatMessage> messages) {
    for (std::size_t i = 0; i < messages.size();) {
      const ChatMessage& message = messages[i];
      std::size_t run = 1;
      Status status = Ok{};
      if (message.role == ChatRole::kTool) {
        while (i + run < messages.size() && messages[i + run].role == ChatRole::kTool) {
          ++run;
        }
        status = write_results(messages.subspan(i, run), i);
      } else if (message.role == ChatRole::kAssistant) {
        calls_ = message.tool_calls;
        num_results_ = 0;
        status = write_assistant(out_, message, thinking_);
      } else {
        status = write_system_or_user(out_, message);
      }
      if (!status) {
        return message.role == ChatRole::kTool
                   ? status
                   : Status(fail("messages[{}].{}", i, status.message()));
      }
      i += run;
    }
    return Ok{};
  }

 private:
  Status write_results(std::span<const ChatMessage> run, std::size_t first_idx) {
    for (const ToolResult& result : order_results(run, first_idx, calls_)) {
      const std::string& name = result.call ? calls_[*result.call].name : result.message->name;
      if (name.empty()) {
        return fail("messages[{}]: a tool result needs a name, or the tool_call_id of a call",
                    result.message_idx);
      }
      ++num_results_;
      out_.open("message",
                {{"role", "tool"}, {"tool", name}, {"index", std::to_string(num_results_)}});
      write_content(out_, *result.message);
      out_.close_message();
    }
    return Ok{};
  }

  SegmentWriter& out_;
  bool thinking_;
  std::vector<ToolCall> calls_;  // of the last assistant message
  std::size_t num_results_ = 0;  // since the last assistant message
};

Status write_response_format(SegmentWriter& out, const Conversation& conversation) {
  switch (conversation.response_format) {
    case ResponseFormat::kText:
      return Ok{};
    case ResponseFormat::kJsonObject:
      out.system_message("response-format", format_body("json_object"));
      return Ok{};
    case ResponseFormat::kJsonSchema: {
      const auto schema = compact(conversation.response_schema_json, "response_format schema");
      if (!schema) {
        return schema.failure();
      }
      out.system_message("response-format",
                         format_body("json_schema") +
                             "\nThe JSON data must match the following schema:\n```json\n" +
                             *schema + "\n```");
      return Ok{};
    }
  }
  TDM_CHECK(false);
}

}  // namespace

Expected<std::vector<Segment>> KimiTemplate::render(const Conversation& conversation) const {
  SegmentWriter out;
  if (!conversation.tools_json.empty()) {
    const auto tools = compact(conversation.tools_json, "tools");
    if (!tools) {
      return tools.failure();
    }
    out.system_message("tool-declare", tools_body(*tools));
  }
  if (conversation.thinking && conversation.effort) {
    out.system_message("thinking-effort", effort_body(*conversation.effort));
  }
  const Status messages = MessageRenderer(out, conversation.thinking).render(conversation.messages);
  if (!messages) {
    return messages.failure();
  }
  if (conversation.tool_choice != ToolChoice::kAuto) {
    const bool required = conversation.tool_choice == ToolChoice::kRequired;
    out.system_message("tool-choice", required ? kRequiredBody : kNoToolsBody);
  }
  if (const Status format = write_response_format(out, conversation); !format) {
    return format.failure();
  }
  if (conversation.add_generation_prompt) {
    out.open("message", {{"role", "assistant"}});
    out.open(conversation.thinking ? "think" : "response");
  }
  return out.take();
}

}  // namespace tandem
