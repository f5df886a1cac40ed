#include "text/special_tokens.h"

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "core/checked_cast.h"

namespace tandem {

Expected<SpecialTokens> SpecialTokens::create(std::int32_t first_id,
                                              std::vector<SpecialToken> tokens) {
  SpecialTokens table;
  table.first_id_ = first_id;
  table.tokens_ = std::move(tokens);
  std::set<char> first_bytes;
  std::set<std::size_t, std::greater<>> lengths;
  std::int32_t id = first_id;
  for (const SpecialToken& token : table.tokens_) {
    if (token.text.empty()) {
      return fail("special token {}: expected a spelling, got an empty string", id);
    }
    const auto [place, is_new] = table.ids_.emplace(token.text, id);
    if (!is_new) {
      return fail("special token \"{}\" has two ids, {} and {}", token.text, place->second, id);
    }
    first_bytes.insert(token.text.front());
    lengths.insert(token.text.size());
    ++id;
  }
  table.first_bytes_.assign(first_bytes.begin(), first_bytes.end());
  table.lengths_.assign(lengths.begin(), lengths.end());
  return table;
}

const SpecialToken* SpecialTokens::find(std::int32_t id) const {
  const std::int64_t idx = std::int64_t{id} - first_id_;
  return idx >= 0 && idx < size() ? &tokens_[usize(idx)] : nullptr;
}

std::optional<std::int32_t> SpecialTokens::id_of(std::string_view text) const {
  const auto place = ids_.find(text);
  return place == ids_.end() ? std::nullopt : std::optional(place->second);
}

std::optional<SpecialTokens::Hit> SpecialTokens::search(std::string_view text) const {
  if (first_bytes_.empty()) {
    return std::nullopt;
  }
  for (std::size_t at = text.find_first_of(first_bytes_); at != std::string_view::npos;
       at = text.find_first_of(first_bytes_, at + 1)) {
    for (const std::size_t length : lengths_) {
      if (length > text.size() - at) {
        continue;
      }
      if (const auto id = id_of(text.substr(at, length))) {
        return Hit{at, length, *id};
      }
    }
  }
  return std::nullopt;
}

}  // namespace tandem
