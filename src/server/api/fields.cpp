#include "server/api/fields.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "io/json_strict.h"

namespace tandem::server {
namespace {

constexpr int kMaxDepth = 128;

/// "a number", "true", "the string \"abc\"": what was found, for messages.
std::string describe(const Json& value) {
  if (value.is_string()) {
    return "the string " + detail::show_text(value.get_ref<const std::string&>());
  }
  if (value.is_structured()) {
    return value.is_array() ? "a list" : "an object";
  }
  return to_line(value);
}

std::string range_text(IntRange range) {
  constexpr IntRange kAny;
  if (range.most == kAny.most) {
    return range.least == kAny.least ? "a whole number"
                                     : fmt::format("a whole number of at least {}", range.least);
  }
  return fmt::format("a whole number from {} to {}", range.least, range.most);
}

bool is_json(std::string_view content_type) {
  std::string type(content_type.substr(0, content_type.find(';')));
  std::erase_if(type, [](char c) { return c == ' ' || c == '\t'; });
  std::ranges::transform(type, type.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return type == "application/json";
}

}  // namespace

Json parse_body(const HttpRequest& request, bool may_be_empty, Problem& problem) {
  if (request.body.empty() && may_be_empty) {
    return Json::object();
  }
  const std::string* type = request.header("content-type");
  if (type == nullptr || !is_json(*type)) {
    problem.set(
        {415, "unsupported_media_type", "expected the header Content-Type: application/json", ""});
    return Json::object();
  }
  if (request.body.empty()) {
    problem.reject("", "the body is empty: expected a JSON object");
    return Json::object();
  }
  auto body = detail::parse_json_strict(request.body, kMaxDepth);
  if (!body) {
    problem.reject("", "the body is not JSON: " + body.message());
    return Json::object();
  }
  if (!body->is_object()) {
    problem.reject("", "the body is " + describe(*body) + ": expected a JSON object");
    return Json::object();
  }
  return *std::move(body);
}

std::optional<std::int64_t> read_integer(const Json& value, const std::string& path, IntRange range,
                                         Problem& problem) {
  std::optional<std::int64_t> number;
  if (value.is_number_unsigned()) {
    const auto wide = value.get<std::uint64_t>();
    if (wide <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      number = static_cast<std::int64_t>(wide);
    }
  } else if (value.is_number_integer()) {
    number = value.get<std::int64_t>();
  } else if (value.is_number_float()) {
    const double real = value.get<double>();
    if (real == std::floor(real) && std::abs(real) < 9.0e15) {  // exact in a double
      number = static_cast<std::int64_t>(real);
    }
  }
  if (!number || *number < range.least || *number > range.most) {
    problem.reject(path,
                   fmt::format("{} is {}: expected {}", path, describe(value), range_text(range)));
    return std::nullopt;
  }
  return number;
}

std::vector<std::int32_t> read_token_ids(const Json& list, const std::string& path,
                                         std::int64_t vocab_size, Problem& problem) {
  std::vector<std::int32_t> ids;
  if (!list.is_array()) {
    problem.reject(path, path + " is " + describe(list) + ": expected a list of token ids");
    return ids;
  }
  ids.reserve(list.size());
  for (const Json& item : list) {
    // The common case without making a path for each of a million ids.
    if (item.is_number_unsigned() &&
        item.get<std::uint64_t>() < static_cast<std::uint64_t>(vocab_size)) {
      ids.push_back(static_cast<std::int32_t>(item.get<std::uint64_t>()));
      continue;
    }
    const auto id =
        read_integer(item, fmt::format("{}[{}]", path, ids.size()), {0, vocab_size - 1}, problem);
    if (!id) {
      return {};
    }
    ids.push_back(static_cast<std::int32_t>(*id));
  }
  return ids;
}

const Json* FieldReader::find(std::string_view key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool FieldReader::boolean(std::string_view key, bool missing) const {
  const Json* value = find(key);
  if (value == nullptr) {
    return missing;
  }
  if (!value->is_boolean()) {
    reject(key, fmt::format("{} is {}: expected true or false", path_of(key), describe(*value)));
    return missing;
  }
  return value->get<bool>();
}

std::int64_t FieldReader::integer(std::string_view key, std::int64_t missing,
                                  IntRange range) const {
  return maybe_integer(key, range).value_or(missing);
}

std::optional<std::int64_t> FieldReader::maybe_integer(std::string_view key, IntRange range) const {
  const Json* value = find(key);
  return value == nullptr ? std::nullopt : read_integer(*value, path_of(key), range, problem_);
}

double FieldReader::number(std::string_view key, double missing, NumberRange range) const {
  const Json* value = find(key);
  if (value == nullptr) {
    return missing;
  }
  const double number = value->is_number() ? value->get<double>() : NAN;
  // Written so that NaN fails.
  const bool is_above = range.excludes_least ? number > range.least : number >= range.least;
  if (!is_above || !(number <= range.most)) {
    const std::string bound =
        range.most == std::numeric_limits<double>::max()
            ? fmt::format("a number {} {}", range.excludes_least ? "above" : "of at least",
                          range.least)
            : fmt::format("a number in {}{}, {}]", range.excludes_least ? '(' : '[', range.least,
                          range.most);
    reject(key, fmt::format("{} is {}: expected {}", path_of(key), describe(*value), bound));
    return missing;
  }
  return number;
}

std::string FieldReader::string(std::string_view key, std::string missing) const {
  const Json* value = find(key);
  if (value == nullptr) {
    return missing;
  }
  if (!value->is_string()) {
    reject(key, fmt::format("{} is {}: expected a string", path_of(key), describe(*value)));
    return missing;
  }
  return value->get<std::string>();
}

std::vector<std::string> FieldReader::strings(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr) {
    return {};
  }
  if (value->is_string()) {
    return {value->get<std::string>()};
  }
  std::vector<std::string> all;
  if (value->is_array()) {
    for (const Json& item : *value) {
      if (!item.is_string()) {
        problem_.reject(fmt::format("{}[{}]", path_of(key), all.size()),
                        fmt::format("{}[{}] is {}: expected a string", path_of(key), all.size(),
                                    describe(item)));
        return {};
      }
      all.push_back(item.get<std::string>());
    }
    return all;
  }
  reject(key, fmt::format("{} is {}: expected a string or a list of strings", path_of(key),
                          describe(*value)));
  return {};
}

std::vector<std::int32_t> FieldReader::token_ids(std::string_view key,
                                                 std::int64_t vocab_size) const {
  const Json* value = find(key);
  return value == nullptr ? std::vector<std::int32_t>()
                          : read_token_ids(*value, path_of(key), vocab_size, problem_);
}

const Json* FieldReader::object(std::string_view key) const {
  const Json* value = find(key);
  if (value != nullptr && !value->is_object()) {
    reject(key, fmt::format("{} is {}: expected an object", path_of(key), describe(*value)));
    return nullptr;
  }
  return value;
}

}  // namespace tandem::server
