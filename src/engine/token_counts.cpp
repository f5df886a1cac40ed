#include "engine/token_counts.h"

#include <algorithm>

#include "core/checked_cast.h"

namespace tandem {

void TokenCounts::reserve(std::int64_t num_tokens) {
  seen_.reserve(usize(num_tokens));
}

void TokenCounts::add_prompt(std::span<const std::int32_t> tokens) {
  std::vector<std::int32_t> ids(tokens.begin(), tokens.end());
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (const std::int32_t id : ids) {
    entry(id);
  }
}

void TokenCounts::add_response(std::int32_t token) {
  ++entry(token).num_in_response;
}

SeenToken& TokenCounts::entry(std::int32_t token) {
  const auto at = std::ranges::lower_bound(seen_, token, {}, &SeenToken::token);
  return at != seen_.end() && at->token == token ? *at : *seen_.insert(at, {token, 0});
}

}  // namespace tandem
