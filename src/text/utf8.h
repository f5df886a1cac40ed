// utf8.h — walking bytes that may or may not be UTF-8 (Unicode 15, table 3-7), and the one notion
// of "space" that is not a regex's.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tandem {

/// U+FFFD, the replacement character, in UTF-8.
inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

enum class Utf8Kind {
  kValid,       ///< one whole character
  kInvalid,     ///< bytes that no continuation can repair
  kIncomplete,  ///< the text ends inside a character that is well-formed so far
};

/// The first character of a text. `length` is in bytes, at least 1; for the two bad kinds it is the
/// maximal well-formed prefix ("maximal subpart"), which one U+FFFD stands for. `code` is set only
/// when the kind is kValid.
struct Utf8Char {
  Utf8Kind kind = Utf8Kind::kInvalid;
  std::uint32_t code = 0;
  std::size_t length = 1;
};

/// Reads the first character of `text`, which must not be empty.
[[nodiscard]] Utf8Char first_utf8_char(std::string_view text);

/// Replaces every maximal malformed part by U+FFFD.
[[nodiscard]] std::string to_valid_utf8(std::string_view bytes);

[[nodiscard]] bool is_valid_utf8(std::string_view bytes);

/// Python's str.isspace() for one character: Unicode White_Space plus U+001C..U+001F.
[[nodiscard]] bool is_python_space(std::uint32_t code);

/// True when `text` is empty or nothing but Python spaces.
[[nodiscard]] bool is_blank(std::string_view text);

}  // namespace tandem
