#include "text/pretokenizer.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem {
namespace {

using ::testing::ElementsAre;

using Parts = std::vector<std::string>;

Parts strings(const std::vector<std::string_view>& views) {
  return {views.begin(), views.end()};
}

struct SplitCase {
  const char* name;
  std::string text;
  Parts parts;
};

// Derived by hand from the expression; the numbers in the comments are its alternatives.
const std::vector<SplitCase>& split_cases() {
  static const std::vector<SplitCase> kCases = {
      {"empty", "", {}},
      {"words", "Hello, world!", {"Hello", ",", " world", "!"}},
      {"han_and_fullwidth", "! 你好，世界！", {"!", " ", "你好", "，", "世界", "！"}},
      {"contractions", "I'm DON'T we'LL it's", {"I'm", " DON'T", " we'LL", " it's"}},
      {"contraction_then_letters", "don'ts", {"don't", "s"}},
      {"no_contraction", "rock'n", {"rock", "'n"}},
      {"typographic_apostrophe", "it’s", {"it", "’s"}},
      {"long_s_is_an_s_without_case", "it'ſ", {"it'ſ"}},
      {"digits_in_threes", "1234567", {"123", "456", "7"}},
      {"arabic_digits", "x٣٤٥٦", {"x", "٣٤٥", "٦"}},
      {"number_letters", "²½Ⅷ1", {"²½Ⅷ", "1"}},
      {"space_before_number", "a 1", {"a", " ", "1"}},
      {"camel", "camelCase HTTPServer", {"camel", "Case", " HTTPServer"}},  // 2, 2, 2
      {"upper_only", "ABC", {"ABC"}},                                       // 3
      {"title_case_letter", "ǅa", {"ǅa"}},
      // Lo is in both classes: upper* takes all of กก and gives one back to lower+.
      {"other_letters_backtrack", "Aกก", {"Aกก"}},
      {"lower_then_other_then_upper", "aกA", {"aก", "A"}},
      {"two_spaces", "a  b", {"a", " ", " b"}},                   // 7 leaves one space to the word
      {"spaces_to_the_end", "a   ", {"a", "   "}},                // 7
      {"spaces_then_newline", "a   \n b", {"a", "   \n", " b"}},  // 6
      {"newlines_around_space", "\n \n", {"\n \n"}},
      {"crlf", "a\r\n\r\nb", {"a", "\r\n\r\n", "b"}},
      {"punctuation_takes_newlines", "x;\n\ny", {"x", ";\n\n", "y"}},  // 5
      {"space_punctuation_crlf", "a }\r\n", {"a", " }\r\n"}},
      {"tabs", "\t\tfoo", {"\t", "\tfoo"}},
      {"symbol_leads_a_word", "(foo)", {"(foo", ")"}},
      {"one_space_leads_punctuation", "  (", {" ", " ("}},
      {"nbsp_leads_a_word", "a\u00A0b", {"a", "\u00A0b"}},
      {"nbsp_is_a_space", "a\u00A0 1", {"a", "\u00A0", " ", "1"}},
      {"ideographic_space", "a\u3000\u3000b", {"a", "\u3000", "\u3000b"}},
      {"line_separator_is_no_newline", "!\u2028", {"!", "\u2028"}},
      {"next_line_is_a_space_not_a_newline", "  \u0085!", {"  ", "\u0085", "!"}},
      {"mongolian_vowel_separator_is_none", "  \u180E", {" ", " \u180E"}},
      {"file_separator_is_none", "  \x1C", {" ", " \x1C"}},
      {"zero_width_space_is_none", "  \u200B", {" ", " \u200B"}},
      {"combining_mark_inside", "e\u0301a b", {"e\u0301a", " b"}},
      {"combining_mark_after_symbol",
       "!\u0301",
       {"!\u0301"}},  // 2: "!" leads, the mark is the word
      {"combining_mark_after_digit", "1\u0301", {"1", "\u0301"}},
      {"devanagari", "हिन्दी में", {"हिन्दी", " में"}},
      {"han_then_kana", "日本語カタカナ", {"日本語", "カタカナ"}},
      {"latin_kana_han", "aあ漢b", {"aあ", "漢", "b"}},
      {"han_after_space", "a 漢", {"a", " ", "漢"}},  // 2 and 3 exclude Han, 1 has no lead
      {"shared_punctuation_is_not_han", "日、本", {"日", "、", "本"}},
      {"iteration_mark_is_han", "人々", {"人々"}},
      {"closing_mark_is_a_letter_but_not_han", "a〆切", {"a〆", "切"}},
      {"prolonged_sound_mark_is_not", "漢ー", {"漢", "ー"}},
      {"ideographic_zero_is_han", "〇1", {"〇", "1"}},
      {"ideographic_zero_is_a_number_too", "1〇1", {"1〇1"}},
      {"han_beyond_the_bmp", "𠀀a", {"𠀀", "a"}},
      {"han_radical_is_a_symbol_but_han", "!⺀", {"!⺀"}},  // 5 has begun and takes it
      {"han_radical_alone", "⺀!", {"⺀", "!"}},
      {"emoji_sequence", "👩‍👩 🎉", {"👩‍👩", " 🎉"}},
      {"hangul", "한국어 x", {"한국어", " x"}},
      {"nul", std::string("a\0b", 3), {"a", std::string("\0b", 2)}},
      {"bad_byte_between_words", "ab\xFF cd", {"ab", "\xFF", " cd"}},
      {"bad_stretch", "a\xC0\x80\xED\xA0\x80z", {"a", "\xC0\x80\xED\xA0\x80", "z"}},
      {"cut_character", "a\xE4\xBD", {"a", "\xE4\xBD"}},
  };
  return kCases;
}

TEST(PreTokenizer, SplitsAsDerivedByHand) {
  const PreTokenizer pre_tokenizer;
  for (const SplitCase& test : split_cases()) {
    EXPECT_EQ(strings(pre_tokenizer.split(test.text)), test.parts) << test.name;
  }
}

TEST(CutIntoPieces, RunsAndBlocksAreBounded) {
  const PieceLimits limits{.piece_chars = 10, .run_chars = 3};
  const auto cut = [&](std::string_view text) { return strings(cut_into_pieces(text, limits)); };
  EXPECT_THAT(cut(""), ElementsAre());
  EXPECT_THAT(cut("aaa"), ElementsAre("aaa"));
  EXPECT_THAT(cut("aaaa"), ElementsAre("aaa", "a"));
  EXPECT_THAT(cut("aaaaaaa"), ElementsAre("aaa", "aaa", "a"));
  EXPECT_THAT(cut("a!1 \t\n b"), ElementsAre("a!1 \t\n", " b"));  // a space run of 4 is cut
  EXPECT_THAT(cut("ab cd ef g"), ElementsAre("ab cd ef g"));
  EXPECT_THAT(cut("ab cd ef gh i"), ElementsAre("ab cd ef g", "h i"));
  // A new block starts new runs: "gg" ends the first, so "ggg" after it is whole.
  EXPECT_THAT(cut("a b c d ggggg"), ElementsAre("a b c d gg", "ggg"));
}

TEST(CutIntoPieces, CountsCharactersNotBytes) {
  const PieceLimits limits{.piece_chars = 4, .run_chars = 2};
  EXPECT_THAT(strings(cut_into_pieces("你好吗", limits)), ElementsAre("你好", "吗"));
  EXPECT_THAT(strings(cut_into_pieces("\u3000\u00A0\x1C", limits)),
              ElementsAre("\u3000\u00A0", "\x1C"));  // Python takes U+001C for a space
  EXPECT_THAT(strings(cut_into_pieces("a\u200B\u200B", limits)), ElementsAre("a\u200B", "\u200B"));
  EXPECT_THAT(strings(cut_into_pieces("\xFF\xFF\xFF", limits)), ElementsAre("\xFF\xFF", "\xFF"));
}

TEST(CutIntoPieces, DefaultLimits) {
  const std::string run(25'000, 'x');
  EXPECT_EQ(cut_into_pieces(run).size(), 1U);
  EXPECT_THAT(cut_into_pieces(run + "y"), ElementsAre(run, "y"));
  std::string words;
  for (int i = 0; i < 200'000; ++i) {
    words += "a ";
  }
  EXPECT_EQ(cut_into_pieces(words).size(), 1U);
  EXPECT_THAT(cut_into_pieces(words + "b"), ElementsAre(words, "b"));
}

}  // namespace
}  // namespace tandem
