#include "text/grammar/token_trie.h"

#include <algorithm>
#include <limits>

#include "core/checked_cast.h"

namespace tandem {
namespace {

bool is_special(const Tokenizer& tokenizer, std::int32_t id, std::string_view bytes) {
  return tokenizer.is_control(id) || tokenizer.special_id(bytes) == id;
}

std::size_t common_prefix(std::string_view a, std::string_view b) {
  const std::size_t length = std::min(a.size(), b.size());
  std::size_t i = 0;
  while (i < length && a[i] == b[i]) {
    ++i;
  }
  return i;
}

}  // namespace

TokenTrie::TokenTrie(const Tokenizer& tokenizer) {
  const auto vocab = checked_cast<std::int32_t>(tokenizer.vocab_size());
  bytes_.resize(usize(vocab));
  for (std::int32_t id = 0; id < vocab; ++id) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    if (!bytes.empty() && bytes.size() <= std::numeric_limits<std::uint16_t>::max() &&
        !is_special(tokenizer, id, bytes)) {
      bytes_[usize(id)] = bytes;
      token_ids_.push_back(id);
      max_bytes_ = std::max(max_bytes_, checked_cast<std::int32_t>(bytes.size()));
    }
  }
  std::stable_sort(token_ids_.begin(), token_ids_.end(), [&](std::int32_t a, std::int32_t b) {
    return bytes_[usize(a)] < bytes_[usize(b)];
  });
  std::vector<std::int32_t> path{0};  // nodes from the root to the last token's
  nodes_.push_back({});
  std::string_view last;
  const auto close_below = [&](std::size_t depth) {
    for (; path.size() > depth + 1; path.pop_back()) {
      nodes_[usize(path.back())].subtree_end = checked_cast<std::int32_t>(isize(nodes_));
    }
  };
  for (std::size_t i = 0; i < token_ids_.size(); ++i) {
    const std::string_view bytes = bytes_[usize(token_ids_[i])];
    close_below(common_prefix(last, bytes));
    for (std::size_t depth = path.size() - 1; depth < bytes.size(); ++depth) {
      path.push_back(checked_cast<std::int32_t>(isize(nodes_)));
      // Nodes on the way to this token hold none themselves: their tokens would have come first.
      nodes_.push_back({static_cast<std::uint8_t>(bytes[depth]),
                        checked_cast<std::uint16_t>(depth + 1), 0, checked_cast<std::int32_t>(i)});
    }
    last = bytes;
  }
  close_below(0);
  nodes_[0].subtree_end = checked_cast<std::int32_t>(isize(nodes_));
  nodes_.push_back({0, 0, 0, checked_cast<std::int32_t>(isize(token_ids_))});
}

std::string_view TokenTrie::bytes_of(std::int32_t id) const {
  return id >= 0 && id < vocab_size() ? std::string_view(bytes_[usize(id)]) : std::string_view();
}

std::shared_ptr<const TokenTrie> make_token_trie(const Tokenizer& tokenizer) {
  return std::make_shared<const TokenTrie>(tokenizer);
}

}  // namespace tandem
