#include "text/kimi_tokenizer.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/checked_cast.h"
#include "core/mmap_file.h"
#include "text/utf8.h"

namespace tandem {
namespace {

using nlohmann::json;

std::string_view text_of(const MmapFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// The file's JSON object; null when there is no such file.
Expected<json> read_optional_json(const std::filesystem::path& path) {
  std::error_code ignored;  // what cannot be looked at is reported by open() of the main file
  if (!std::filesystem::exists(path, ignored)) {
    return json();
  }
  auto file = MmapFile::open(path.string());
  if (!file) {
    return file.failure();
  }
  try {
    json value = json::parse(text_of(*file));
    if (!value.is_object()) {
      return fail("{}: expected a JSON object", path.string());
    }
    return value;
  } catch (const json::exception& error) {
    return fail("{}: {}", path.string(), error.what());
  }
}

// One entry of added_tokens_decoder: "163586": {"content": "<|end_of_msg|>", "special": true}.
Expected<KimiTokenizer::NamedSpecial> parse_added_token(const std::string& key, const json& entry,
                                                        std::int64_t first_id) {
  std::int32_t id = -1;
  const auto [stop, error] = std::from_chars(key.data(), key.data() + key.size(), id);
  const std::int64_t offset = std::int64_t{id} - first_id;
  if (error != std::errc() || stop != key.data() + key.size() || offset < 0 ||
      offset >= KimiTokenizer::kNumSpecials) {
    return fail("expected ids {}..{} (the {} ids behind the merges), got \"{}\"", first_id,
                first_id + KimiTokenizer::kNumSpecials - 1, KimiTokenizer::kNumSpecials, key);
  }
  const auto content = entry.is_object() ? entry.find("content") : entry.end();
  if (!entry.is_object() || content == entry.end() || !content->is_string()) {
    return fail("\"{}\": expected an object with a string \"content\"", key);
  }
  const auto special = entry.find("special");
  if (special != entry.end() && !special->is_boolean()) {
    return fail("\"{}\": expected true or false in \"special\"", key);
  }
  const bool control = special != entry.end() && special->get<bool>();
  return KimiTokenizer::NamedSpecial{checked_cast<std::int32_t>(offset),
                                     {content->get<std::string>(), control}};
}

Expected<std::vector<KimiTokenizer::NamedSpecial>> parse_added_tokens(const json& config,
                                                                      std::int64_t first_id) {
  const auto table = config.find("added_tokens_decoder");
  if (table == config.end()) {
    return KimiTokenizer::k3_specials();
  }
  if (!table->is_object()) {
    return fail("added_tokens_decoder: expected an object");
  }
  std::vector<KimiTokenizer::NamedSpecial> named;
  for (const auto& [key, entry] : table->items()) {
    auto token = parse_added_token(key, entry, first_id);
    if (!token) {
      return fail("added_tokens_decoder: {}", token.message());
    }
    named.push_back(std::move(*token));
  }
  return named;
}

// "eos_token" is a string or {"content": string}; the spelling, or empty when there is none.
Expected<std::string> parse_eos_token(const json& config) {
  auto eos = config.find("eos_token");
  if (eos == config.end() || eos->is_null()) {
    return std::string();
  }
  const json& value = eos->is_object() && eos->contains("content") ? (*eos)["content"] : *eos;
  if (!value.is_string()) {
    return fail("eos_token: expected a string");
  }
  return value.get<std::string>();
}

// "eos_token_id" is one id or a list of ids.
Expected<std::vector<std::int32_t>> parse_eos_ids(const json& config, std::int64_t vocab_size) {
  const auto eos = config.find("eos_token_id");
  if (eos == config.end() || eos->is_null()) {
    return std::vector<std::int32_t>();
  }
  const json list = eos->is_array() ? *eos : json::array({*eos});
  std::vector<std::int32_t> ids;
  for (const json& item : list) {
    if (!item.is_number_integer() || item.get<std::int64_t>() < 0 ||
        item.get<std::int64_t>() >= vocab_size) {
      return fail("eos_token_id: expected ids in 0..{}, got {}", vocab_size - 1, item.dump());
    }
    ids.push_back(item.get<std::int32_t>());
  }
  return ids;
}

}  // namespace

std::vector<KimiTokenizer::NamedSpecial> KimiTokenizer::k3_specials() {
  constexpr bool kControl = true;
  constexpr bool kText = false;  // the markers of the chat grammar survive skip_special
  return {{0, {"[BOS]", kControl}},
          {1, {"[EOS]", kControl}},
          {2, {"<|end_of_msg|>", kControl}},
          {3, {"<|open|>", kText}},
          {4, {"<|close|>", kText}},
          {5, {"<|sep|>", kText}},
          {6, {"[start_header_id]", kControl}},
          {7, {"[end_header_id]", kControl}},
          {9, {"[EOT]", kControl}},
          {18, {"<|media_begin|>", kControl}},
          {19, {"<|media_content|>", kControl}},
          {20, {"<|media_end|>", kControl}},
          {21, {"<|media_pad|>", kControl}},
          {65, {"<osagent_mode>", kControl}},
          {254, {"[UNK]", kControl}},
          {255, {"[PAD]", kControl}}};
}

Expected<std::unique_ptr<KimiTokenizer>> KimiTokenizer::create(
    BpeVocab vocab, const std::vector<NamedSpecial>& named,
    const std::vector<std::int32_t>& extra_stops) {
  if (vocab.size() > std::numeric_limits<std::int32_t>::max() - kNumSpecials) {
    return fail("the vocabulary has {} ranks; ids must fit 31 bits", vocab.size());
  }
  const auto first_id = checked_cast<std::int32_t>(vocab.size());
  std::vector<SpecialToken> tokens;
  for (std::int32_t offset = 0; offset < kNumSpecials; ++offset) {
    tokens.push_back({fmt::format("<|reserved_token_{}|>", first_id + offset), true});
  }
  for (const NamedSpecial& special : named) {
    TDM_CHECK(special.offset >= 0 && special.offset < kNumSpecials, special.offset);
    tokens[usize(special.offset)] = special.token;
  }
  auto specials = SpecialTokens::create(first_id, std::move(tokens));
  if (!specials) {
    return specials.failure();
  }
  std::unique_ptr<KimiTokenizer> made(new KimiTokenizer(std::move(vocab), std::move(*specials)));
  made->stop_ids_ = extra_stops;
  for (const std::string_view name : {"[EOS]", "<|end_of_msg|>"}) {
    if (const auto id = made->special_id(name)) {
      made->stop_ids_.push_back(*id);
    }
  }
  std::sort(made->stop_ids_.begin(), made->stop_ids_.end());
  made->stop_ids_.erase(std::unique(made->stop_ids_.begin(), made->stop_ids_.end()),
                        made->stop_ids_.end());
  return made;
}

Expected<std::unique_ptr<KimiTokenizer>> KimiTokenizer::load(const std::string& dir) {
  const std::filesystem::path folder(dir);
  const std::string merges_path = (folder / kFileName).string();
  auto merges = MmapFile::open(merges_path);
  if (!merges) {
    return merges.failure();
  }
  auto vocab = BpeVocab::parse(text_of(*merges), merges_path);
  if (!vocab) {
    return vocab.failure();
  }
  const std::filesystem::path config_path = folder / "tokenizer_config.json";
  const auto config = read_optional_json(config_path);
  if (!config) {
    return config.failure();
  }
  auto named = parse_added_tokens(*config, vocab->size());
  if (!named) {
    return fail("{}: {}", config_path.string(), named.message());
  }
  const auto eos_token = parse_eos_token(*config);
  if (!eos_token) {
    return fail("{}: {}", config_path.string(), eos_token.message());
  }
  const std::filesystem::path generation_path = folder / "generation_config.json";
  const auto generation = read_optional_json(generation_path);
  if (!generation) {
    return generation.failure();
  }
  auto stops = parse_eos_ids(*generation, vocab->size() + kNumSpecials);
  if (!stops) {
    return fail("{}: {}", generation_path.string(), stops.message());
  }
  if (!eos_token->empty()) {
    const auto eos = std::find_if(named->begin(), named->end(), [&](const NamedSpecial& special) {
      return special.token.text == *eos_token;
    });
    if (eos == named->end()) {
      return fail("{}: eos_token \"{}\" is not among the special tokens", config_path.string(),
                  *eos_token);
    }
    stops->push_back(checked_cast<std::int32_t>(vocab->size() + eos->offset));
  }
  auto made = create(std::move(*vocab), *named, *stops);
  if (!made) {
    return fail("{}: {}", config_path.string(), made.message());
  }
  return made;
}

std::string_view KimiTokenizer::token_bytes(std::int32_t id) const {
  if (id >= 0 && id < vocab_.size()) {
    return vocab_.bytes(id);
  }
  const SpecialToken* special = specials_.find(id);
  return special != nullptr ? std::string_view(special->text) : kReplacementCharacter;
}

bool KimiTokenizer::is_control(std::int32_t id) const {
  const SpecialToken* special = specials_.find(id);
  return special != nullptr && special->control;
}

void KimiTokenizer::append_ordinary(std::vector<std::int32_t>& ids, std::string_view piece) const {
  for (const std::string_view pre_token : pre_tokenizer_.split(piece)) {
    vocab_.append_merged(ids, pre_token);
  }
}

void KimiTokenizer::append_encoded(std::vector<std::int32_t>& ids, std::string_view text,
                                   bool allow_special) const {
  // As in the reference the cuts come first, so a special spelling across one is ordinary text.
  for (const std::string_view piece : cut_into_pieces(text)) {
    if (allow_special) {
      specials_.split(
          piece, [&](std::string_view part) { append_ordinary(ids, part); },
          [&](std::int32_t id) { ids.push_back(id); });
    } else {
      append_ordinary(ids, piece);
    }
  }
}

}  // namespace tandem
