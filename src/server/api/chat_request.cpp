#include "server/api/chat_request.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "text/json_text.h"
#include "text/kimi_markers.h"

namespace tandem::server {
namespace {

/// "messages[0]: role: expected ..." -> "messages[0].role".
std::string path_in(const std::string& message) {
  std::string text = message;
  for (std::size_t at = text.find("]: "); at != std::string::npos; at = text.find("]: ")) {
    const std::size_t end = text.find_first_of(": ", at + 3);
    if (end == std::string::npos || text[end] != ':') {
      text = text.substr(0, at + 1);
      break;
    }
    text.replace(at, 3, "].");
  }
  return text.substr(0, text.find(": "));
}

/// Names of the declared tools. Problems: entries that are not functions, names that repeat.
std::set<std::string> read_tool_names(const FieldReader& fields) {
  std::set<std::string> names;
  const Json* tools = fields.find("tools");
  if (tools == nullptr) {
    return names;
  }
  if (!tools->is_array()) {
    fields.reject("tools", "tools: expected a list of tools");
    return names;
  }
  for (std::size_t i = 0; i < tools->size(); ++i) {
    const std::string path = fmt::format("tools[{}]", i);
    if (!(*tools)[i].is_object()) {
      fields.problem().reject(path, path + ": expected an object");
      return names;
    }
    const FieldReader tool((*tools)[i], fields.problem(), path + ".");
    const Json* function = tool.object("function");
    if (tool.string("type", "function") != "function" || function == nullptr) {
      fields.problem().reject(path,
                              path + ": expected {\"type\": \"function\", \"function\": ...}");
      return names;
    }
    const FieldReader inner(*function, fields.problem(), path + ".function.");
    const std::string name = inner.string("name");
    if (name.empty()) {
      inner.reject("name", path + ".function.name: expected the function's name");
    } else if (!names.insert(name).second) {
      inner.reject("name", fmt::format("{}.function.name: \"{}\" is declared twice", path, name));
    }
    (void)inner.object("parameters");
  }
  return names;
}

/// The name of a tool_choice that names a function; empty: it does not.
std::string read_named_choice(const FieldReader& fields, const std::set<std::string>& names) {
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr) {
    return {};
  }
  if (!choice->is_object()) {
    if (names.empty() && is_text(*choice, "required")) {
      fields.reject("tool_choice", "tool_choice is \"required\": expected tools to choose from");
    }
    return {};
  }
  const FieldReader outer(*choice, fields.problem(), "tool_choice.");
  if (const std::string type = outer.string("type", "function"); type != "function") {
    outer.reject("type", fmt::format("tool_choice.type is \"{}\": expected \"function\"", type));
    return {};
  }
  const Json* function = outer.object("function");
  const std::string name =
      function == nullptr
          ? std::string()
          : FieldReader(*function, fields.problem(), "tool_choice.function.").string("name");
  if (!names.contains(name)) {
    fields.problem().reject(
        "tool_choice.function.name",
        fmt::format("tool_choice.function.name is \"{}\": expected the name of a declared tool",
                    name));
  }
  return name;
}

/// Fields of OpenAI's that would change the answer; silence would be a lie.
void refuse_unsupported(const FieldReader& fields) {
  for (const std::string_view key : {"functions", "function_call", "audio", "web_search_options"}) {
    if (const Json* value = fields.find(key); value != nullptr && !is_nothing(*value)) {
      fields.reject(key, fmt::format("{} is not supported", key));
    }
  }
  for (const std::string& modality : fields.strings("modalities")) {
    if (modality != "text") {
      fields.reject("modalities",
                    fmt::format("modalities has \"{}\": expected \"text\" alone", modality));
    }
  }
}

/// A named choice as the prompt knows it: only this tool, and it is required.
std::string with_single_tool(const std::string& body_text, const std::string& name) {
  auto body = parse_json(body_text);
  if (!body) {
    return body_text;
  }
  for (JsonMember& member : body->members) {
    if (member.key == "tools") {
      std::erase_if(member.value.items, [&](const JsonNode& tool) {
        const JsonNode* function = tool.find("function");
        const JsonNode* tool_name = function == nullptr ? nullptr : function->find("name");
        return tool_name == nullptr || tool_name->text != name;
      });
    } else if (member.key == "tool_choice") {
      member.value = JsonNode{JsonKind::kString, "required", {}, {}};
    }
  }
  return dump_json(*body, JsonStyle::kSpaced);
}

bool ends_with_open_think(const Tokenizer& tokenizer, const std::vector<std::int32_t>& ids) {
  if (!has_markers(tokenizer)) {
    return false;
  }
  const std::array<Segment, 3> opening{Segment{"<|open|>", true}, Segment{"think", false},
                                       Segment{"<|sep|>", true}};
  const std::vector<std::int32_t> tail = tokenizer.encode_segments(opening);
  return ids.size() >= tail.size() && std::equal(tail.rbegin(), tail.rend(), ids.rbegin());
}

void set_grammar(const FieldReader& fields, const Conversation& conversation, PromptPlan& plan) {
  Sampling& sampling = plan.sampling;
  const bool has_format = conversation.response_format != ResponseFormat::kText;
  const bool must_call = conversation.tool_choice == ToolChoice::kRequired;
  if (has_format && must_call) {
    fields.reject("response_format",
                  "response_format and a required tool_choice exclude each other");
  }
  if ((has_format || must_call) && sampling.grammar.kind != GrammarSource::Kind::kNone) {
    const std::string field = has_format ? "response_format" : "tool_choice";
    fields.reject(field, field + " and " + sampling.grammar.param + " exclude each other");
  }
  if (must_call) {
    sampling.grammar = {GrammarSource::Kind::kTools, conversation.tools_json, false,
                        plan.single_call, "tools"};
    return;
  }
  if (!has_format) {
    return;
  }
  if (conversation.response_format == ResponseFormat::kJsonObject) {
    sampling.grammar = {GrammarSource::Kind::kJsonObject, "", false, false, "response_format"};
    return;
  }
  const Json* format = fields.object("response_format");
  const Json* inner =
      format == nullptr
          ? nullptr
          : FieldReader(*format, fields.problem(), "response_format.").object("json_schema");
  const bool is_strict =
      inner != nullptr && FieldReader(*inner, fields.problem(), "response_format.json_schema.")
                              .boolean("strict", false);
  sampling.grammar = {GrammarSource::Kind::kJsonSchema, conversation.response_schema_json,
                      is_strict, false, "response_format.json_schema.schema"};
}

}  // namespace

Conversation read_conversation(const Service& service, const Json& body,
                               const std::string& body_text, Problem& problem) {
  const FieldReader fields(body, problem);
  const std::string choice = read_named_choice(fields, read_tool_names(fields));
  if (problem) {
    return {};
  }
  auto conversation =
      parse_conversation(choice.empty() ? body_text : with_single_tool(body_text, choice));
  if (!conversation) {
    problem.reject(path_in(conversation.message()), conversation.message());
    return {};
  }
  if (!has_markers(service.tokenizer)) {
    conversation->thinking = false;
  }
  return *std::move(conversation);
}

std::vector<std::int32_t> render(const Service& service, const Conversation& conversation,
                                 Problem& problem) {
  Conversation shown = conversation;
  if (!has_markers(service.tokenizer)) {
    // A plain prompt has no place to tell the format; the grammar enforces it all the same.
    shown.response_format = ResponseFormat::kText;
  }
  const auto segments = service.chat_template->render(shown);
  if (!segments) {
    problem.reject(path_in(segments.message()), segments.message());
    return {};
  }
  return service.tokenizer.encode_segments(*segments);
}

ChatRequest read_chat_request(const Service& service, const Json& body,
                              const std::string& body_text, Problem& problem) {
  const FieldReader fields(body, problem);
  ChatRequest request;
  PromptPlan& plan = request.plan;
  check_model_name(service, fields);
  refuse_unsupported(fields);
  plan.sampling = read_sampling(fields, Endpoint::kChat, service.limits);
  plan.sampling.request.priority =
      static_cast<std::int32_t>(fields.integer("priority", 0, {-1000000, 1000000}));
  plan.sampling.request.cache_salt =
      fields.string(fields.has("cache_salt") ? "cache_salt" : "extra_key");
  request.stream = read_stream_fields(fields);
  plan.rid = fields.string("rid");
  request.wants_logprobs = plan.sampling.request.want_logprobs;
  request.separates_reasoning = fields.boolean("separate_reasoning", true);
  request.returns_token_ids = fields.boolean("return_token_ids", false);
  request.returns_prompt_ids = fields.boolean("return_prompt_token_ids", request.returns_token_ids);
  plan.single_call = !fields.boolean("parallel_tool_calls", true);
  if (!fields.boolean("stream_reasoning", true)) {
    fields.reject("stream_reasoning", "stream_reasoning: false is not supported");
  }
  if (fields.boolean("continue_final_message", false)) {
    fields.reject("continue_final_message", "continue_final_message is not supported");
  }
  plan.is_chat = true;
  if (fields.has("input_ids") && !fields.has("messages")) {
    plan.ids = fields.token_ids("input_ids", service.limits.vocab_size);
  } else if (!problem) {
    const Conversation conversation = read_conversation(service, body, body_text, problem);
    if (problem) {
      return request;
    }
    set_grammar(fields, conversation, plan);
    plan.ids = fields.has("input_ids") ? fields.token_ids("input_ids", service.limits.vocab_size)
                                       : render(service, conversation, problem);
  }
  if (problem) {
    return request;
  }
  const char* source = fields.has("input_ids") ? "input_ids" : "messages";
  if (plan.ids.empty()) {
    fields.reject(source, fmt::format("{}: the prompt is empty", source));
    return request;
  }
  plan.thinking = ends_with_open_think(service.tokenizer, plan.ids);
  plan.max_new_tokens = fit_to_context(plan.sampling, static_cast<std::int64_t>(plan.ids.size()),
                                       service.limits, source, problem);
  return request;
}

}  // namespace tandem::server
