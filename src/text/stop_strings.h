// stop_strings.h — ends a text at the first of several strings, although text arrives in pieces.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"

namespace tandem {

/// Emits what can no longer become part of a match: holds back the longest suffix that is a proper
/// prefix of a stop string, and no more. The match that begins first wins, of equal ones the
/// longest, however the text is cut; so a match that a longer or earlier one may still replace
/// waits for the text that decides. O(1) a byte on average (Aho-Corasick).
class StopStrings {
 public:
  static constexpr std::size_t kMaxStrings = 16;
  static constexpr std::size_t kMaxBytes = 1024;  // of one string

  /// Errors: a Failure naming an empty string, one of more than 1,024 bytes, or more than 16 of
  /// them.
  static Expected<StopStrings> create(std::vector<std::string> stops);

  /// Text that may go out now. After a match nothing more comes out.
  [[nodiscard]] std::string push(std::string_view text);
  /// The end of the text: what was held back, up to the match if there is one.
  [[nodiscard]] std::string finish();
  /// The stop string that was met; empty: none. With it text ends before the match.
  [[nodiscard]] const std::string& matched() const { return matched_; }

 private:
  // A node is a prefix of some stop string.
  struct Node {
    std::vector<std::pair<char, std::int32_t>> children;
    std::int32_t fallback = 0;       // the longest proper suffix that is a node too
    std::int32_t depth = 0;          // bytes of the prefix
    std::int32_t growing_depth = 0;  // of its longest suffix, itself included, that can grow
    std::int32_t stop = -1;          // the longest stop string that it ends with
  };

  void add(const std::string& stop, std::int32_t idx);
  void link();
  [[nodiscard]] std::int32_t child_of(std::int32_t node, char c) const;
  void advance(char c);
  [[nodiscard]] std::string emit_up_to(std::int64_t position);
  void settle();

  std::vector<std::string> stops_;
  std::vector<Node> nodes_{1};
  std::int32_t node_ = 0;
  std::int64_t position_ = 0;   // bytes read
  std::int64_t emitted_ = 0;    // bytes that went out
  std::string held_;            // bytes emitted_ .. position_
  std::int64_t match_at_ = -1;  // begin of the best match so far
  std::int32_t match_ = -1;     // its stop string
  std::string matched_;
};

}  // namespace tandem
