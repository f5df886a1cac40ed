// token_counts.h — the tokens of a response (and its prompt) that penalties look at.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/sample.h"

namespace tandem {

/// Distinct tokens in order of their id. Appending one costs a binary search, and a move of those
/// behind it when it is new.
class TokenCounts {
 public:
  /// For as many distinct tokens as will ever be held: nothing below allocates then.
  void reserve(std::int64_t num_tokens);
  void add_prompt(std::span<const std::int32_t> tokens);
  void add_response(std::int32_t token);
  [[nodiscard]] std::span<const SeenToken> seen() const { return seen_; }

 private:
  SeenToken& entry(std::int32_t token);

  std::vector<SeenToken> seen_;
};

}  // namespace tandem
