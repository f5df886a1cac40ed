// token_trie.h — the ordinary tokens of a vocabulary as a trie of their bytes, in depth-first
// order: a walk that refuses a byte skips the whole subtree with one addition.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "text/grammar.h"

namespace tandem {

class TokenTrie {
 public:
  /// Tokens without bytes and special tokens are left out.
  explicit TokenTrie(const Tokenizer& tokenizer);

  struct Node {
    std::uint8_t byte = 0;         // of the edge into it
    std::uint16_t depth = 0;       // bytes from the root
    std::int32_t subtree_end = 0;  // the first node behind its subtree
    std::int32_t first_token = 0;  // index of the tokens that end here; up to the next node's
  };
  /// Node 0 is the root.
  [[nodiscard]] std::int32_t num_nodes() const {
    return static_cast<std::int32_t>(nodes_.size()) - 1;
  }
  [[nodiscard]] const Node& node(std::int32_t idx) const {
    return nodes_[static_cast<std::size_t>(idx)];
  }
  /// Ids of the tokens that end at a node.
  [[nodiscard]] std::span<const std::int32_t> tokens_at(std::int32_t idx) const {
    return {token_ids_.data() + node(idx).first_token,
            token_ids_.data() + node(idx + 1).first_token};
  }
  /// The token's bytes; empty for ids that are not in the trie.
  [[nodiscard]] std::string_view bytes_of(std::int32_t id) const;
  [[nodiscard]] std::int32_t vocab_size() const { return static_cast<std::int32_t>(bytes_.size()); }
  /// Length of the longest token.
  [[nodiscard]] std::int32_t max_bytes() const { return max_bytes_; }

 private:
  std::vector<std::string> bytes_;  // by id: own copies, so that the trie may outlive the tokenizer
  std::vector<Node> nodes_;         // one more than there are, for the last one's tokens
  std::vector<std::int32_t> token_ids_;
  std::int32_t max_bytes_ = 0;
};

}  // namespace tandem
