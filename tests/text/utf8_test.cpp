#include "text/utf8.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(Utf8, ReadsEveryLengthAtItsLimits) {
  const std::pair<std::string_view, std::uint32_t> cases[] = {{"\x7F", 0x7F},
                                                              {"\xC2\x80", 0x80},
                                                              {"\xDF\xBF", 0x7FF},
                                                              {"\xE0\xA0\x80", 0x800},
                                                              {"\xED\x9F\xBF", 0xD7FF},
                                                              {"\xEE\x80\x80", 0xE000},
                                                              {"\xEF\xBF\xBF", 0xFFFF},
                                                              {"\xF0\x90\x80\x80", 0x10000},
                                                              {"\xF4\x8F\xBF\xBF", 0x10FFFF}};
  for (const auto& [bytes, code] : cases) {
    const Utf8Char first = first_utf8_char(bytes);
    EXPECT_EQ(first.kind, Utf8Kind::kValid) << code;
    EXPECT_EQ(first.code, code);
    EXPECT_EQ(first.length, bytes.size()) << code;
    for (std::size_t cut = 1; cut < bytes.size(); ++cut) {
      const Utf8Char part = first_utf8_char(bytes.substr(0, cut));
      EXPECT_EQ(part.kind, Utf8Kind::kIncomplete) << code << " cut at " << cut;
      EXPECT_EQ(part.length, cut);
    }
  }
}

TEST(Utf8, ReplacesMaximalSubparts) {
  const std::string r(kReplacementCharacter);
  EXPECT_EQ(to_valid_utf8("ab"), "ab");
  EXPECT_EQ(to_valid_utf8("\xF0\x9F\x98"), r);  // cut off: one part
  EXPECT_EQ(to_valid_utf8("\xF0\x9F\x98z"), r + "z");
  EXPECT_EQ(to_valid_utf8("\xC0\x80"), r + r);                  // overlong NUL
  EXPECT_EQ(to_valid_utf8("\xE0\x9F\x80"), r + r + r);          // overlong
  EXPECT_EQ(to_valid_utf8("\xED\xA0\x80"), r + r + r);          // surrogate
  EXPECT_EQ(to_valid_utf8("\xF4\x90\x80\x80"), r + r + r + r);  // above U+10FFFF
  EXPECT_EQ(to_valid_utf8("\xFF\x80"), r + r);
  EXPECT_EQ(to_valid_utf8("\xE2("), r + "(");
  EXPECT_TRUE(is_valid_utf8("日\xEF\xBF\xBD"));
  EXPECT_FALSE(is_valid_utf8("日\xE6"));
}

TEST(Utf8, BlankIsPythonSpaces) {
  EXPECT_TRUE(is_blank(""));
  EXPECT_TRUE(is_blank(" \t\r\n\x1C\x1F\u0085\u00A0\u3000\u2003"));
  EXPECT_FALSE(is_blank(" \u200B"));
  EXPECT_FALSE(is_blank(" \u180E"));
  EXPECT_FALSE(is_blank(" \xFF"));
}

}  // namespace
}  // namespace tandem
