// pretokenizer.h — how K3 cuts a text before byte-pair merging: first into bounded pieces, then by
// the regular expression. No merge crosses a cut.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

namespace tandem {

/// Limits of cut_into_pieces(), in characters; the defaults are the reference tokenizer's.
struct PieceLimits {
  std::size_t piece_chars = 400'000;
  std::size_t run_chars = 25'000;  // of one class: Python's str.isspace() or not
};

/// Cuts `text` every `piece_chars` characters, and each of those so that no run of one class is
/// longer than `run_chars`. A malformed part (see Utf8Char) counts as one character, not a space.
/// The pieces are views into `text` and join up to it. Only pathological texts give more than one.
[[nodiscard]] std::vector<std::string_view> cut_into_pieces(std::string_view text,
                                                            PieceLimits limits = {});

/// K3's pre-tokenisation expression. Immutable, so usable from several threads.
class PreTokenizer {
 public:
  PreTokenizer();
  PreTokenizer(PreTokenizer&&) noexcept;
  PreTokenizer& operator=(PreTokenizer&&) noexcept;
  ~PreTokenizer();

  /// The pre-tokens of `piece`: views that join up to it. Each maximal stretch of malformed UTF-8
  /// is one pre-token, and the well-formed text on its two sides is matched separately.
  /// Errors:  throws Error when the regex engine runs out of memory.
  [[nodiscard]] std::vector<std::string_view> split(std::string_view piece) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
