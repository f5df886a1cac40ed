// special_tokens.h — the table of special tokens that both tokenizers carry behind their ordinary
// tokens: consecutive ids, unique spellings, and the search for a spelling in a text.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace tandem {

struct SpecialToken {
  std::string text;
  bool control = true;  // left out by SpecialText::kSkip ("special": true in added_tokens_decoder)
};

class SpecialTokens {
 public:
  /// The tokens get the ids first_id, first_id + 1, ...
  /// Errors: a Failure naming an empty or repeated spelling.
  static Expected<SpecialTokens> create(std::int32_t first_id, std::vector<SpecialToken> tokens);

  [[nodiscard]] std::int32_t first_id() const { return first_id_; }
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(tokens_.size()); }
  /// nullptr when the id is not special.
  [[nodiscard]] const SpecialToken* find(std::int32_t id) const;
  [[nodiscard]] std::optional<std::int32_t> id_of(std::string_view text) const;

  struct Hit {
    std::size_t begin = 0;
    std::size_t length = 0;
    std::int32_t id = 0;
  };
  /// The leftmost special spelling in `text`, the longest one at that place.
  [[nodiscard]] std::optional<Hit> search(std::string_view text) const;

  /// Calls on_text(std::string_view) and on_special(std::int32_t id) for the parts of `text`, in
  /// order; every text part is free of special spellings, the last one may be empty.
  template <std::invocable<std::string_view> OnText, std::invocable<std::int32_t> OnSpecial>
  void split(std::string_view text, OnText on_text, OnSpecial on_special) const {
    while (const auto hit = search(text)) {
      on_text(text.substr(0, hit->begin));
      on_special(hit->id);
      text.remove_prefix(hit->begin + hit->length);
    }
    on_text(text);
  }

 private:
  std::int32_t first_id_ = 0;
  std::vector<SpecialToken> tokens_;
  std::map<std::string, std::int32_t, std::less<>> ids_;
  std::string first_bytes_;           // distinct first bytes of all spellings
  std::vector<std::size_t> lengths_;  // distinct lengths of all spellings, longest first
};

}  // namespace tandem
