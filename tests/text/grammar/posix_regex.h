// posix_regex.h — the C library's regular expressions as a second opinion. (std::regex does not
// compile without warnings under GCC 12's sanitizers.) No \d, no (?:...), no lazy quantifiers.
#pragma once

#include <string>

#include <regex.h>

#include "core/check.h"

namespace tandem::testing {

class PosixRegex {
 public:
  explicit PosixRegex(const std::string& pattern) {
    TDM_CHECK(regcomp(&compiled_, pattern.c_str(), REG_EXTENDED | REG_NOSUB) == 0, pattern);
  }
  PosixRegex(const PosixRegex&) = delete;
  PosixRegex& operator=(const PosixRegex&) = delete;
  ~PosixRegex() { regfree(&compiled_); }

  /// A match somewhere in the text.
  [[nodiscard]] bool finds(const std::string& text) const {
    return regexec(&compiled_, text.c_str(), 0, nullptr, 0) == 0;
  }

 private:
  regex_t compiled_{};
};

}  // namespace tandem::testing
