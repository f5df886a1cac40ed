#include "text/grammar/regex.h"

#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "text/grammar/grammar_session.h"
#include "text/grammar/posix_regex.h"

namespace tandem {
namespace {

using testing::GrammarSession;
using ::testing::HasSubstr;

const GrammarSession& session() {
  static const GrammarSession kSession;
  return kSession;
}

struct Row {
  std::string pattern;
  std::vector<std::string> yes;
  std::vector<std::string> no;
};

TEST(GrammarRegex, MatchesWholeTexts) {
  const std::vector<Row> rows = {
      {"", {""}, {"a"}},
      {"abc", {"abc"}, {"ab", "abcd", ""}},
      {"a|bc|", {"a", "bc", ""}, {"abc", "b"}},
      {"^a$|^b", {"a", "b"}, {"ab", "^a"}},
      {"(a|b)*c", {"c", "abac"}, {"ab", "cc"}},
      {"(?:ab)+?", {"ab", "abab"}, {"", "aba"}},
      {"(?<name>x)y", {"xy"}, {"x"}},
      {"a{2}b{0,1}c{2,}", {"aacc", "aabccc"}, {"acc", "aac", "aabbcc"}},
      {"a{0}", {""}, {"a"}},
      {"[a-c_-]+", {"ab_-c"}, {"d", ""}},
      {"[^a-c]", {"d", "ä", "\n"}, {"a", "", "dd"}},
      {"[]x", {}, {"x"}},
      {R"([\d\]\\^-]+)", {"1]\\^-"}, {"a"}},
      {R"(\d\D\w\W\s\S)", {"1a_- x"}, {"aa_- x", "1a_-xx"}},
      {".", {"a", "日", "\U0001F389", "\""}, {"\n", "\r", "\u2028", "", "ab", "\xE6"}},
      {R"(\x41\u00e4\u{1F389}\.\/\$)", {"Aä\U0001F389./$"}, {"A"}},
      {R"(\n\t\0)", {std::string("\n\t\0", 3)}, {"nt0"}},
      {"[ä-ö]+", {"äåö"}, {"a", "ø"}},
      {"[\\u0400-\\u{10000}]", {"Ж", "\uFFFD", "\U00010000"}, {"z", "\U00010001"}},
      {"日本?", {"日", "日本"}, {"本"}},
      {"((a?){3}b){2}", {"bb", "aabab", "aaabaaab"}, {"aaaabb", "b"}},
  };
  for (const Row& row : rows) {
    const auto grammar = compile_regex(row.pattern);
    if (row.yes.empty()) {
      EXPECT_FALSE(grammar.ok()) << row.pattern;
      continue;
    }
    ASSERT_TRUE(grammar.ok()) << row.pattern << ": " << grammar.message();
    for (const std::string& text : row.yes) {
      EXPECT_TRUE(session().matches(**grammar, text)) << row.pattern << " on " << text;
    }
    for (const std::string& text : row.no) {
      EXPECT_FALSE(session().matches(**grammar, text)) << row.pattern << " on " << text;
    }
  }
}

TEST(GrammarRegex, ErrorsNameTheByte) {
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"a(b", "at byte 3: expected )"},
      {"a)", "at byte 1: no group is open"},
      {"*a", "at byte 0: nothing to repeat"},
      {"a**", "at byte 2: nothing to repeat"},
      {"a{2", "at byte 3: expected }"},
      {"a{x}", "at byte 2: expected a number"},
      {"a{3,2}", "minimum is above"},
      {"a{1001}", "at most 1000"},
      {"a{1,99999999999}", "at most 1000"},
      {"[a", "expected a character"},
      {"[b-a]", "rising order"},
      {"[a-\\d]", "rising order"},
      {"\\", "expected a character behind"},
      {"\\1", "\\1 is not supported"},
      {"\\bx", "\\b is not supported"},
      {"\\p{L}", "\\p is not supported"},
      {"\\xZ1", "hexadecimal"},
      {"\\ud800", "surrogate"},
      {"\\u{110000}", "beyond"},
      {"(?=a)", "lookaround"},
      {"(?<!a)", "lookaround"},
      {"(?i)a", "flags"},
      {"(?<na", "expected > behind"},
      {"a^b", "anchors"},
      {"(a$)b", "anchors"},
      {"a$b", "expected |"},
      {"\xFF", "not UTF-8"},
      {"[^\\s\\S]", "no text can match"},
  };
  for (const auto& [pattern, message] : rows) {
    const auto grammar = compile_regex(pattern);
    ASSERT_FALSE(grammar.ok()) << pattern;
    EXPECT_THAT(grammar.message(), HasSubstr(message)) << pattern;
  }
}

TEST(GrammarRegex, LimitsEndEveryCompilation) {
  const std::vector<std::string> patterns = {
      "((a{1000}){1000}){1000}", "(((((a?){1000})?){1000})?){1000}",
      "(a|b)*a(a|b){40}",        "(.{1,30}x){1,30}y(.*z.{25})",
      std::string(100'000, '('), fmt::format("({}){{1000}}", std::string(50'000, '|')),
  };
  for (const std::string& pattern : patterns) {
    const auto grammar = compile_regex(pattern, {.max_states = 20'000});
    EXPECT_FALSE(grammar.ok()) << pattern.substr(0, 40);
  }
  EXPECT_THAT(compile_regex(std::string(300'000, 'a')).message(), HasSubstr("300000 bytes"));
  EXPECT_THAT(compile_regex("a{100}", {.max_states = 50}).message(), HasSubstr("50 states"));
  EXPECT_THAT(compile_regex("a{1000}b{1000}", {.max_compile_s = -1}).message(),
              HasSubstr("longer"));
}

// Against the C library's engine, which knows bytes only.
TEST(GrammarRegex, AgreesWithPosixOnRandomExpressions) {
  Rng rng(11);
  const std::function<std::string(int)> expression = [&](int depth) -> std::string {
    const std::vector<std::string> atoms = {"a", "b", "[ab]", "[^a]", ".", "[0-9]", "1"};
    switch (depth == 0 ? 0 : rng.below(6)) {
      case 0:
      case 1:
        return atoms[rng.below(atoms.size())];
      case 2:
        return expression(depth - 1) + expression(depth - 1);
      case 3:
        return fmt::format("({}|{})", expression(depth - 1), expression(depth - 1));
      case 4: {
        const std::vector<std::string> counts = {"*", "+", "?", "{2}", "{1,2}", "{2,}"};
        return fmt::format("({}){}", expression(depth - 1), counts[rng.below(counts.size())]);
      }
      default:
        return fmt::format("({})", expression(depth - 1));
    }
  };
  for (int round = 0; round < 150; ++round) {
    const std::string pattern = expression(4);
    const auto grammar = compile_regex(pattern).value_or_throw();
    const testing::PosixRegex reference(fmt::format("^({})$", pattern));
    for (int i = 0; i < 20; ++i) {
      std::string text;
      for (std::uint64_t length = rng.below(6); length > 0; --length) {
        text += "ab1"[rng.below(3)];
      }
      ASSERT_EQ(session().matches(*grammar, text), reference.finds(text))
          << pattern << " on " << text;
    }
  }
}

TEST(GrammarRegex, Utf8SequencesSpellExactlyTheSet) {
  Rng rng(5);
  const std::vector<std::uint32_t> borders = {0,      0x7F,   0x80,   0x7FF,   0x800,
                                              0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF};
  for (int round = 0; round < 200; ++round) {
    const auto code = [&] {
      const std::uint64_t near = borders[rng.below(borders.size())] + rng.below(3);
      return static_cast<std::uint32_t>(rng.below(2) == 0 ? std::min<std::uint64_t>(near, 0x10FFFF)
                                                          : rng.below(0x110000));
    };
    std::uint32_t low = code();
    std::uint32_t high = code();
    if (low > high) {
      std::swap(low, high);
    }
    const grammar::CharSet set{{low, high}};
    std::uint64_t spelled = 0;
    for (const auto& sequence : grammar::utf8_sequences(set)) {
      std::uint64_t product = 1;
      for (const grammar::ByteRange& range : sequence) {
        ASSERT_LE(range.low, range.high);
        product *= static_cast<std::uint64_t>(range.high - range.low + 1);
      }
      spelled += product;
    }
    std::uint64_t expected = 0;
    for (const grammar::CodeRange& range : set.ranges()) {
      expected += range.high - range.low + 1;
    }
    EXPECT_EQ(spelled, expected) << low << " " << high;
  }
}

}  // namespace
}  // namespace tandem
