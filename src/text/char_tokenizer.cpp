#include "text/char_tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/checked_cast.h"
#include "core/mmap_file.h"
#include "text/utf8.h"

namespace tandem {
namespace {

using nlohmann::json;

Expected<std::vector<std::string>> parse_strings(const json& object, const char* field) {
  const auto list = object.find(field);
  if (list == object.end() || !list->is_array()) {
    return fail("{}: expected a list of strings", field);
  }
  std::vector<std::string> strings;
  for (const json& item : *list) {
    if (!item.is_string()) {
      return fail("{}[{}]: expected a string, got {}", field, strings.size(), item.type_name());
    }
    strings.push_back(item.get<std::string>());
  }
  return strings;
}

Expected<CharTokenizer::Spec> parse_spec(const json& object) {
  if (!object.is_object()) {
    return fail("expected a JSON object");
  }
  for (const auto& [key, value] : object.items()) {
    if (key != "type" && key != "tokens" && key != "special" && key != "stop") {
      return fail("unknown field \"{}\"; expected type, tokens, special, stop", key);
    }
  }
  if (!object.contains("type") || object["type"] != "char") {
    return fail("type: expected \"char\"");
  }
  CharTokenizer::Spec spec;
  for (const auto& [field, target] :
       {std::pair("tokens", &spec.tokens), std::pair("special", &spec.special),
        std::pair("stop", &spec.stop)}) {
    auto strings = parse_strings(object, field);
    if (!strings) {
      return strings.failure();
    }
    *target = std::move(*strings);
  }
  return spec;
}

}  // namespace

Expected<std::unique_ptr<CharTokenizer>> CharTokenizer::create(Spec spec) {
  std::unique_ptr<CharTokenizer> made(new CharTokenizer());
  if (spec.tokens.size() + spec.special.size() > usize(std::numeric_limits<std::int32_t>::max())) {
    return fail("tokens: expected fewer than 2^31");
  }
  made->ids_.push_back(-1);
  std::set<std::string_view> seen;
  std::int32_t id = 0;
  for (const std::string& token : spec.tokens) {
    if (token.empty() || !is_valid_utf8(token)) {
      return fail("tokens[{}]: expected non-empty UTF-8", id);
    }
    if (!seen.insert(token).second) {
      return fail("tokens[{}]: \"{}\" is there twice", id, token);
    }
    made->add_to_trie(token, id);
    ++id;
  }
  std::vector<SpecialToken> specials;
  for (const std::string& text : spec.special) {
    if (!is_valid_utf8(text)) {
      return fail("special[{}]: expected UTF-8", specials.size());
    }
    specials.push_back({text, text != kUnknown});
  }
  auto table = SpecialTokens::create(id, std::move(specials));
  if (!table) {
    return table.failure();
  }
  made->specials_ = std::move(*table);
  const auto unknown = made->special_id(kUnknown);
  if (!unknown) {
    return fail("special: expected \"{}\" among the entries", kUnknown);
  }
  made->unknown_id_ = *unknown;
  for (const std::string& text : spec.stop) {
    const auto stop = made->special_id(text);
    if (!stop) {
      return fail("stop: \"{}\" is not in special", text);
    }
    made->stop_ids_.push_back(*stop);
  }
  std::sort(made->stop_ids_.begin(), made->stop_ids_.end());
  made->spec_ = std::move(spec);
  return made;
}

Expected<std::unique_ptr<CharTokenizer>> CharTokenizer::load(const std::string& path) {
  auto file = MmapFile::open(path);
  if (!file) {
    return file.failure();
  }
  const auto* text = reinterpret_cast<const char*>(file->bytes().data());
  try {
    auto spec = parse_spec(json::parse(text, text + file->bytes().size()));
    if (!spec) {
      return fail("{}: {}", path, spec.message());
    }
    auto made = create(std::move(*spec));
    if (!made) {
      return fail("{}: {}", path, made.message());
    }
    return made;
  } catch (const json::exception& error) {
    return fail("{}: {}", path, error.what());
  }
}

void CharTokenizer::save(const std::string& path) const {
  nlohmann::ordered_json object;
  object["type"] = "char";
  object["tokens"] = spec_.tokens;
  object["special"] = spec_.special;
  object["stop"] = spec_.stop;
  const std::string temporary = path + ".tmp";
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  out << object.dump(1) << '\n';
  out.close();
  std::error_code error;
  if (out) {
    std::filesystem::rename(temporary, path, error);
  }
  if (!out || error) {
    std::error_code ignored;  // the first failure is the one to report
    std::filesystem::remove(temporary, ignored);
    throw_error("{}: cannot write the tokenizer{}{}", path, error ? ": " : "",
                error ? error.message() : "");
  }
}

void CharTokenizer::add_to_trie(std::string_view token, std::int32_t id) {
  std::uint32_t node = 0;
  for (const char c : token) {
    const std::uint64_t edge = std::uint64_t{node} * 256 + static_cast<unsigned char>(c);
    const auto [place, is_new] = edges_.try_emplace(edge, checked_cast<std::uint32_t>(ids_.size()));
    if (is_new) {
      ids_.push_back(-1);
    }
    node = place->second;
  }
  ids_[node] = id;
}

std::string_view CharTokenizer::token_bytes(std::int32_t id) const {
  if (id >= 0 && usize(id) < spec_.tokens.size()) {
    return spec_.tokens[usize(id)];
  }
  const SpecialToken* special = specials_.find(id);
  return special != nullptr && id != unknown_id_ ? std::string_view(special->text)
                                                 : kReplacementCharacter;
}

std::int64_t CharTokenizer::vocab_size() const {
  return isize(spec_.tokens) + specials_.size();
}

bool CharTokenizer::is_control(std::int32_t id) const {
  const SpecialToken* special = specials_.find(id);
  return special != nullptr && special->control;
}

void CharTokenizer::append_ordinary(std::vector<std::int32_t>& ids, std::string_view text) const {
  while (!text.empty()) {
    std::int32_t best_id = unknown_id_;
    std::size_t best_length = 0;
    std::uint32_t node = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      const auto edge =
          edges_.find(std::uint64_t{node} * 256 + static_cast<unsigned char>(text[i]));
      if (edge == edges_.end()) {
        break;
      }
      node = edge->second;
      if (ids_[node] >= 0) {
        best_id = ids_[node];
        best_length = i + 1;
      }
    }
    ids.push_back(best_id);
    text.remove_prefix(best_length > 0 ? best_length : first_utf8_char(text).length);
  }
}

void CharTokenizer::append_encoded(std::vector<std::int32_t>& ids, std::string_view text,
                                   bool allow_special) const {
  if (allow_special) {
    specials_.split(
        text, [&](std::string_view part) { append_ordinary(ids, part); },
        [&](std::int32_t id) { ids.push_back(id); });
  } else {
    append_ordinary(ids, text);
  }
}

}  // namespace tandem
