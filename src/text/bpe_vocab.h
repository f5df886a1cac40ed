// bpe_vocab.h — a byte-level BPE vocabulary in tiktoken's file format: a token's id is its rank,
// and of all neighbouring pairs the one whose joint bytes have the lowest rank merges first.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/error.h"

namespace tandem {

class BpeVocab {
 public:
  /// Parses lines "base64(token bytes) SPACE rank". Lines may come in any order, but the ranks must
  /// be 0..lines-1 and the 256 single bytes must be among the tokens.
  /// Errors: a Failure naming `path` and the line.
  static Expected<BpeVocab> parse(std::string_view text, const std::string& path);

  BpeVocab(const BpeVocab&) = delete;
  BpeVocab& operator=(const BpeVocab&) = delete;
  BpeVocab(BpeVocab&&) noexcept = default;
  BpeVocab& operator=(BpeVocab&&) noexcept = default;
  ~BpeVocab() = default;

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(tokens_.size()); }
  /// `id` must be in 0..size()-1.
  [[nodiscard]] std::string_view bytes(std::int32_t id) const;

  /// Appends the ids of one pre-token; merges never look past its ends.
  /// Cost: O(n log n) in the bytes of `pre_token`, whatever they are.
  void append_merged(std::vector<std::int32_t>& ids, std::string_view pre_token) const;

 private:
  BpeVocab() = default;
  [[nodiscard]] std::int32_t rank_of(std::string_view bytes) const;  // kNoRank when not a token

  std::vector<char> arena_;               // all token bytes; never grows after parse()
  std::vector<std::string_view> tokens_;  // by rank, into arena_
  std::unordered_map<std::string_view, std::int32_t> ranks_;
  std::size_t max_token_bytes_ = 0;
};

}  // namespace tandem
