// stop_strings.h — ends a text at the first of several strings, although text arrives in pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace tandem {

/// Emits what can no longer become part of a match: holds back the longest suffix that is a proper
/// prefix of a stop string, and no more. The earliest match wins, of equal ones the longest. O(1) a
/// byte.
class StopStrings {
 public:
  /// Errors: a Failure naming an empty string, one of more than 1,024 bytes, or more than 16 of
  /// them.
  static Expected<StopStrings> create(std::vector<std::string> stops);

  /// Text that may go out now. After a match nothing more comes out.
  [[nodiscard]] std::string push(std::string_view text);
  /// The end of the text: what was held back.
  [[nodiscard]] std::string finish();
  /// The stop string that was met; empty: none. With it text ends before the match.
  [[nodiscard]] const std::string& matched() const;
};

}  // namespace tandem
