// Workloads from files: one JSON object a line.
#include <cmath>
#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/checked_cast.h"
#include "io/json_strict.h"
#include "server/load/workload.h"

namespace tandem::load {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 64;
constexpr std::int64_t kMaxOutput = 1 << 24;

struct Line {
  Turn turn;
  std::optional<double> at_s;
  std::string session;  // empty: alone
};

Expected<std::vector<std::int32_t>> read_ids(const char* key, const Json& value) {
  std::vector<std::int32_t> ids;
  for (const Json& id : value) {
    if (!id.is_number_integer() || !std::in_range<std::int32_t>(id.get<std::int64_t>()) ||
        id.get<std::int64_t>() < 0) {
      return fail("{}[{}]: expected a token id", key, ids.size());
    }
    ids.push_back(id.get<std::int32_t>());
  }
  if (ids.empty()) {
    return fail("{}: expected at least one token id", key);
  }
  return ids;
}

Expected<std::vector<Message>> read_messages(const Json& value) {
  std::vector<Message> messages;
  if (value.is_array()) {
    for (const Json& message : value) {
      if (!message.is_object() || !message.value("role", Json()).is_string() ||
          !message.value("content", Json()).is_string()) {
        return fail("messages[{}]: expected an object with the texts role and content",
                    messages.size());
      }
      messages.push_back(
          {message["role"].get<std::string>(), message["content"].get<std::string>()});
    }
  }
  if (messages.empty()) {
    return fail("messages: expected a list of at least one message");
  }
  return messages;
}

/// Text or ids under `key`.
Expected<Prompt> read_prompt_at(const char* key, const Json& value, Endpoint endpoint) {
  Prompt prompt;
  if (value.is_array()) {
    if (endpoint == Endpoint::kChat) {
      return fail("{}: expected text, the chat endpoint takes no token ids", key);
    }
    auto ids = read_ids(key, value);
    if (!ids) {
      return ids.failure();
    }
    prompt.ids = *std::move(ids);
    return prompt;
  }
  if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
    return fail("{}: expected a text that is not empty, or a list of token ids", key);
  }
  if (endpoint == Endpoint::kChat) {
    prompt.messages.push_back({"user", value.get<std::string>()});
  } else {
    prompt.text = value.get<std::string>();
  }
  return prompt;
}

Expected<Prompt> read_prompt(const Json& object, Endpoint endpoint) {
  if (object.contains("messages")) {
    if (endpoint != Endpoint::kChat) {
      return fail("messages: expected --endpoint chat, or a prompt");
    }
    auto messages = read_messages(object["messages"]);
    if (!messages) {
      return messages.failure();
    }
    return Prompt{{}, {}, *std::move(messages)};
  }
  for (const char* key : {"input_ids", "prompt", "question"}) {
    if (object.contains(key)) {
      return read_prompt_at(key, object[key], endpoint);
    }
  }
  return fail("expected one of the keys input_ids, prompt, messages, question");
}

Expected<Line> read_line(std::string_view text, const WorkloadOptions& options) {
  const auto object = detail::parse_json_strict(text, kMaxDepth);
  if (!object) {
    return object.failure();
  }
  if (!object->is_object()) {
    return fail("expected a JSON object");
  }
  auto prompt = read_prompt(*object, options.endpoint);
  if (!prompt) {
    return prompt.failure();
  }
  Line line{{*std::move(prompt), options.output_length()}, {}, {}};
  if (object->contains("output_len")) {
    const Json& length = (*object)["output_len"];
    if (!length.is_number_integer() || length.get<std::int64_t>() < 1 ||
        length.get<std::int64_t>() > kMaxOutput) {
      return fail("output_len: expected 1 to {}", kMaxOutput);
    }
    line.turn.output_len = length.get<std::int64_t>();
  }
  if (object->contains("t")) {
    const Json& at = (*object)["t"];
    if (!at.is_number() || !(at.get<double>() >= 0 && at.get<double>() < 1e9)) {
      return fail("t: expected seconds from 0 on");
    }
    line.at_s = at.get<double>();
  }
  if (object->contains("session")) {
    const Json& session = (*object)["session"];
    if (!session.is_string() && !session.is_number_integer()) {
      return fail("session: expected a text or a whole number");
    }
    line.session = session.dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  return line;
}

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == line.npos;
}

}  // namespace

Expected<Workload> parse_workload(std::string_view label, std::string_view text,
                                  const WorkloadOptions& options) {
  Workload workload;
  std::unordered_map<std::string, std::size_t> sessions;
  std::int64_t number = 0;
  std::int64_t num_timed = 0;
  std::int64_t num_read = 0;
  while (!text.empty() && num_read < options.num_prompts) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(line.size() < text.size() ? line.size() + 1 : line.size());
    ++number;
    if (is_blank(line)) {
      continue;
    }
    auto read = read_line(line, options);
    if (!read) {
      return fail("{}:{}: {}", label, number, read.message());
    }
    ++num_read;
    num_timed += read->at_s ? 1 : 0;
    if (num_timed != 0 && num_timed != num_read) {
      return fail("{}:{}: expected t on every line or on none", label, number);
    }
    const auto known = read->session.empty() ? sessions.end() : sessions.find(read->session);
    if (known != sessions.end()) {
      workload.conversations[known->second].turns.push_back(std::move(read->turn));
      continue;
    }
    if (!read->session.empty()) {
      sessions.emplace(read->session, workload.conversations.size());
    }
    workload.conversations.push_back({{std::move(read->turn)}, false, read->at_s.value_or(0)});
  }
  if (num_read == 0) {
    return fail("{}: expected at least one line with a prompt", label);
  }
  workload.has_arrivals = num_timed > 0;
  return workload;
}

}  // namespace tandem::load
