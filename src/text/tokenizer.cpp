#include "text/tokenizer.h"

#include <filesystem>

#include "text/char_tokenizer.h"
#include "text/kimi_tokenizer.h"

namespace tandem {

std::vector<std::int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  append_encoded(ids, text, false);
  return ids;
}

std::vector<std::int32_t> Tokenizer::encode_segments(std::span<const Segment> segments) const {
  std::vector<std::int32_t> ids;
  for (const Segment& segment : segments) {
    append_encoded(ids, segment.text, segment.allow_special);
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, SpecialText special) const {
  std::string out;
  for (const std::int32_t id : ids) {
    if (special == SpecialText::kKeep || !is_control(id)) {
      out += token_bytes(id);
    }
  }
  return out;
}

Expected<std::unique_ptr<Tokenizer>> load_tokenizer(const std::string& dir) {
  const std::filesystem::path folder(dir);
  std::error_code ignored;  // an unreadable folder reads as "no such file" and is reported below
  const bool has_kimi = std::filesystem::exists(folder / KimiTokenizer::kFileName, ignored);
  const bool has_char = std::filesystem::exists(folder / CharTokenizer::kFileName, ignored);
  if (has_kimi && has_char) {
    return fail("{}: has both {} and {}; expected one tokenizer", dir, KimiTokenizer::kFileName,
                CharTokenizer::kFileName);
  }
  if (has_kimi) {
    auto loaded = KimiTokenizer::load(dir);
    if (!loaded) {
      return loaded.failure();
    }
    return std::unique_ptr<Tokenizer>(std::move(*loaded));
  }
  if (has_char) {
    auto loaded = CharTokenizer::load((folder / CharTokenizer::kFileName).string());
    if (!loaded) {
      return loaded.failure();
    }
    return std::unique_ptr<Tokenizer>(std::move(*loaded));
  }
  return fail("{}: no tokenizer, expected {} or {}", dir, KimiTokenizer::kFileName,
              CharTokenizer::kFileName);
}

}  // namespace tandem
