#include "text/kimi_markers.h"

#include "core/check.h"

namespace tandem {

bool has_markers(const Tokenizer& tokenizer) {
  return tokenizer.special_id("<|open|>") && tokenizer.special_id("<|close|>") &&
         tokenizer.special_id("<|sep|>");
}

KimiMarkers markers_of(const Tokenizer& tokenizer) {
  TDM_CHECK(has_markers(tokenizer));
  return {*tokenizer.special_id("<|open|>"), *tokenizer.special_id("<|close|>"),
          *tokenizer.special_id("<|sep|>")};
}

std::string escape_attribute(std::string_view value) {
  std::string out;
  for (const char c : value) {
    out += c == '&' ? "&amp;" : c == '"' ? "&quot;" : std::string(1, c);
  }
  return out;
}

std::string unescape_attribute(std::string_view value) {
  std::string out;
  while (!value.empty()) {
    const bool is_quote = value.starts_with("&quot;");
    const bool is_amp = value.starts_with("&amp;");
    out += is_quote ? '"' : is_amp ? '&' : value.front();
    value.remove_prefix(is_quote ? 6 : is_amp ? 5 : 1);
  }
  return out;
}

}  // namespace tandem
