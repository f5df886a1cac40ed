// fields.h — reading the fields of a JSON request: null and missing are the default, a wrong type
// or range is a problem with the path of the field, an unknown field is ignored.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "server/api/problem.h"

namespace tandem::server {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

/// One line. Invalid UTF-8 (which our own texts never have) becomes U+FFFD.
template <typename AnyJson>
[[nodiscard]] std::string to_line(const AnyJson& json) {
  return json.dump(-1, ' ', false, AnyJson::error_handler_t::replace);
}

/// The body as an object. Problems: 415 for another content type; 400 with the byte for what is not
/// strict JSON (io/json_strict.h), or no object. An empty body is an object without fields if
/// `may_be_empty`.
[[nodiscard]] Json parse_body(const HttpRequest& request, bool may_be_empty, Problem& problem);

[[nodiscard]] inline bool is_text(const Json& value, std::string_view text) {
  return value.is_string() && value.get_ref<const std::string&>() == text;
}
/// What clients send for "none": false, "" and [].
[[nodiscard]] inline bool is_nothing(const Json& value) {
  return is_text(value, "") || (value.is_boolean() && !value.get<bool>()) ||
         (value.is_array() && value.empty());
}

struct IntRange {
  std::int64_t least = std::numeric_limits<std::int64_t>::min();
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
};

struct NumberRange {
  double least;
  double most;
  bool excludes_least = false;
};

class FieldReader {
 public:
  /// `object` outlives the reader. `path` stands before the names of its fields: "messages[0].".
  FieldReader(const Json& object, Problem& problem, std::string path = {})
      : object_(object), problem_(problem), path_(std::move(path)) {}

  /// The field, unless it is missing or null.
  [[nodiscard]] const Json* find(std::string_view key) const;
  [[nodiscard]] bool has(std::string_view key) const { return find(key) != nullptr; }

  [[nodiscard]] bool boolean(std::string_view key, bool missing) const;
  /// 5 and 5.0, but not 5.5, "5" or true.
  [[nodiscard]] std::int64_t integer(std::string_view key, std::int64_t missing,
                                     IntRange range = {}) const;
  [[nodiscard]] std::optional<std::int64_t> maybe_integer(std::string_view key,
                                                          IntRange range = {}) const;
  [[nodiscard]] double number(std::string_view key, double missing, NumberRange range) const;
  [[nodiscard]] std::string string(std::string_view key, std::string missing = {}) const;
  /// One string or a list of them.
  [[nodiscard]] std::vector<std::string> strings(std::string_view key) const;
  /// A list of ids in [0, vocab_size).
  [[nodiscard]] std::vector<std::int32_t> token_ids(std::string_view key,
                                                    std::int64_t vocab_size) const;
  /// nullptr when missing; a problem when it is no object.
  [[nodiscard]] const Json* object(std::string_view key) const;

  void reject(std::string_view key, std::string message) const {
    problem_.reject(path_of(key), std::move(message));
  }
  [[nodiscard]] std::string path_of(std::string_view key) const { return path_ + std::string(key); }
  [[nodiscard]] Problem& problem() const { return problem_; }

 private:
  const Json& object_;
  Problem& problem_;
  std::string path_;
};

/// A list of ids in [0, vocab_size); `path` names it in problems.
[[nodiscard]] std::vector<std::int32_t> read_token_ids(const Json& list, const std::string& path,
                                                       std::int64_t vocab_size, Problem& problem);
/// The value as a whole number; none, with a problem, when it is none or outside the range.
[[nodiscard]] std::optional<std::int64_t> read_integer(const Json& value, const std::string& path,
                                                       IntRange range, Problem& problem);

}  // namespace tandem::server
