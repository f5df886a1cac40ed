// endpoint.h — the three forms in which servers are asked for text: bodies of requests, and what
// the events of an answer say. Only fields of OpenAI's API and ignore_eos under /v1/, SGLang's for
// /generate.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace tandem::load {

enum class Endpoint { kCompletions, kChat, kGenerate };

/// "completions", "chat", "generate". Errors: a Failure that lists them.
[[nodiscard]] Expected<Endpoint> parse_endpoint(std::string_view name);
/// "/v1/completions" and the like.
[[nodiscard]] std::string_view path_of(Endpoint endpoint);

struct Message {
  std::string role;
  std::string content;
};

/// Exactly one of them is filled: ids or text for completions and generate, messages for chat.
struct Prompt {
  std::vector<std::int32_t> ids;
  std::string text;
  std::vector<Message> messages;
};

/// What all requests of a run share.
struct RequestForm {
  Endpoint endpoint = Endpoint::kCompletions;
  std::string model;  // empty: the field is left out
  bool ignore_eos = true;
  double temperature = 0;
};

/// JSON; always asks for a stream that ends with the usage.
[[nodiscard]] std::string request_body(const RequestForm& form, const Prompt& prompt,
                                       std::int64_t output_len);

/// Why an answer is no good: a stable kind, and a sentence.
struct AnswerProblem {
  std::string kind;
  std::string text;
};

/// Reads the events of one answer.
class AnswerReader {
 public:
  explicit AnswerReader(Endpoint endpoint) : endpoint_(endpoint) {}

  /// Tokens that came with new text; 0: the event had none. Chunks of /v1/ count as one token, an
  /// event of /generate as many as its count of completion tokens grew since the last with text.
  [[nodiscard]] double push(std::string_view data);

  /// Of an event pushed so far; its first one stays.
  [[nodiscard]] const std::optional<AnswerProblem>& problem() const { return problem_; }
  /// A finish reason was there.
  [[nodiscard]] bool is_finished() const { return is_finished_; }

  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] const std::vector<std::int32_t>& ids() const { return ids_; }  // /generate only
  // As the server reports them.
  [[nodiscard]] std::optional<std::int64_t> prompt_tokens() const { return prompt_tokens_; }
  [[nodiscard]] std::optional<std::int64_t> output_tokens() const { return output_tokens_; }
  [[nodiscard]] std::optional<std::int64_t> cached_tokens() const { return cached_tokens_; }

 private:
  double push_chunk(const nlohmann::json& chunk);
  double push_native(const nlohmann::json& event);
  void read_native_ids(const nlohmann::json& event);
  void reject(std::string kind, std::string text);

  Endpoint endpoint_;
  std::string text_;
  std::vector<std::int32_t> ids_;
  std::optional<std::int64_t> prompt_tokens_;
  std::optional<std::int64_t> output_tokens_;
  std::optional<std::int64_t> cached_tokens_;
  std::int64_t tokens_with_text_ = 0;  // completion tokens at the last event with text
  bool is_incremental_ = false;        // /generate sends differences
  bool is_finished_ = false;
  std::optional<AnswerProblem> problem_;
};

/// What the body of a refused request says: the message of its error object, or its first bytes.
[[nodiscard]] std::string error_text(std::string_view body);

}  // namespace tandem::load
