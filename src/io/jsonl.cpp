#include "io/jsonl.h"

#include <utility>

#include <nlohmann/json.hpp>

#include "core/mmap_file.h"
#include "io/json_strict.h"

namespace tandem {
namespace {

using detail::show_text;

constexpr int kMaxDepth = 64;

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == line.npos;
}

Expected<std::string> string_field(const nlohmann::json& object, const std::string& key) {
  const auto value = object.find(key);
  if (value == object.end()) {
    return fail("key {}: missing", show_text(key));
  }
  if (!value->is_string()) {
    return fail("key {}: expected a string, found {}", show_text(key), value->type_name());
  }
  return value->get<std::string>();
}

Expected<PromptRecord> parse_record(std::string_view line, const JsonlKeys& keys) {
  const auto object = detail::parse_json_strict(line, kMaxDepth);
  if (!object) {
    return object.failure();
  }
  if (!object->is_object()) {
    return fail("expected a JSON object with the keys {} and {}", show_text(keys.input_key),
                show_text(keys.label_key));
  }
  auto prompt = string_field(*object, keys.input_key);
  if (!prompt) {
    return prompt.failure();
  }
  auto label = string_field(*object, keys.label_key);
  if (!label) {
    return label.failure();
  }
  return PromptRecord{.prompt = *std::move(prompt), .label = *std::move(label), .line = 0};
}

}  // namespace

Expected<std::vector<PromptRecord>> parse_jsonl(std::string_view label, std::string_view text,
                                                const JsonlKeys& keys) {
  std::vector<PromptRecord> records;
  std::int64_t number = 0;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(line.size() < text.size() ? line.size() + 1 : line.size());
    ++number;
    if (is_blank(line)) {
      continue;
    }
    auto record = parse_record(line, keys);
    if (!record) {
      return fail("{}:{}: {}", label, number, record.message());
    }
    record->line = number;
    records.push_back(*std::move(record));
  }
  return records;
}

Expected<std::vector<PromptRecord>> load_jsonl(const std::string& path, const JsonlKeys& keys) {
  const auto map = MmapFile::open(path);
  if (!map) {
    return map.failure();
  }
  const auto bytes = map->bytes();
  return parse_jsonl(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}, keys);
}

}  // namespace tandem
