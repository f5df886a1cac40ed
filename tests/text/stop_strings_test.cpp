#include "text/stop_strings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/checked_cast.h"
#include "core/rng.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

struct Result {
  std::string text;
  std::string matched;

  friend bool operator==(const Result&, const Result&) = default;
};

// The whole text at once, straight from the definition.
Result cut_by_search(const std::string& text, const std::vector<std::string>& stops) {
  std::size_t best = std::string::npos;
  std::string matched;
  for (const std::string& stop : stops) {
    const std::size_t at = text.find(stop);
    if (at < best || (at == best && at != text.npos && stop.size() > matched.size())) {
      best = at;
      matched = stop;
    }
  }
  return {text.substr(0, best), matched};
}

// The longest suffix of `text` that is a proper prefix of a stop string.
std::size_t held_back(const std::string& text, const std::vector<std::string>& stops) {
  std::size_t longest = 0;
  for (const std::string& stop : stops) {
    for (std::size_t n = 1; n < stop.size() && n <= text.size(); ++n) {
      if (text.ends_with(stop.substr(0, n))) {
        longest = std::max(longest, n);
      }
    }
  }
  return longest;
}

TEST(StopStrings, HoldsBackProperPrefixesOnly) {
  StopStrings stops = StopStrings::create({"<|sep|>", "END"}).value_or_throw();
  EXPECT_EQ(stops.push("abc<"), "abc");
  EXPECT_EQ(stops.push("b"), "<b");
  EXPECT_EQ(stops.push("<|se"), "");
  EXPECT_EQ(stops.push("e"), "<|see");
  EXPECT_EQ(stops.push("EN"), "");
  EXPECT_EQ(stops.push("EN"), "EN");
  EXPECT_EQ(stops.push("D and more"), "");
  EXPECT_EQ(stops.matched(), "END");
  EXPECT_EQ(stops.push("x"), "");
  EXPECT_EQ(stops.finish(), "");
}

TEST(StopStrings, TheEndGivesWhatWasHeld) {
  StopStrings stops = StopStrings::create({"abcd", "bc"}).value_or_throw();
  EXPECT_EQ(stops.push("xab"), "x");
  EXPECT_EQ(stops.finish(), "ab");
  EXPECT_EQ(stops.matched(), "");
  // "bc" has matched, but "abcd" would begin earlier.
  stops = StopStrings::create({"abcd", "bc"}).value_or_throw();
  EXPECT_EQ(stops.push("xabc"), "x");
  EXPECT_EQ(stops.matched(), "");
  StopStrings other = stops;
  EXPECT_EQ(stops.push("d"), "");
  EXPECT_EQ(stops.matched(), "abcd");
  EXPECT_EQ(other.push("e"), "a");
  EXPECT_EQ(other.matched(), "bc");
  stops = StopStrings::create({"abcd", "bc"}).value_or_throw();
  EXPECT_EQ(stops.push("xabc"), "x");
  EXPECT_EQ(stops.finish(), "a");
  EXPECT_EQ(stops.matched(), "bc");
}

TEST(StopStrings, WithoutStopsTextPassesThrough) {
  StopStrings none = StopStrings::create({}).value_or_throw();
  EXPECT_EQ(none.push("abc"), "abc");
  EXPECT_EQ(none.finish(), "");
}

TEST(StopStrings, EqualsASearchOfTheWholeTextHoweverItIsCut) {
  Rng rng(9);
  for (int round = 0; round < 3000; ++round) {
    const auto word = [&](std::uint64_t least, std::uint64_t most) {
      std::string text;
      for (std::uint64_t n = least + rng.below(most - least + 1); n > 0; --n) {
        text += "ab"[rng.below(2)];
      }
      return text;
    };
    std::vector<std::string> stops;
    for (std::uint64_t n = rng.below(4); n > 0; --n) {
      stops.push_back(word(2, 6));
    }
    const std::string text = word(0, 24);
    StopStrings matcher = StopStrings::create(stops).value_or_throw();
    Result result;
    std::string seen;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t length = 1 + rng.below(4);
      const std::string piece = text.substr(at, length);
      at += piece.size();
      seen += piece;
      result.text += matcher.push(piece);
      if (cut_by_search(seen, stops).matched.empty()) {
        ASSERT_EQ(result.text.size() + held_back(seen, stops), seen.size()) << seen;
      }
    }
    result.text += matcher.finish();
    result.matched = matcher.matched();
    ASSERT_EQ(result, cut_by_search(text, stops)) << text << " " << ::testing::PrintToString(stops);
  }
}

TEST(StopStrings, BadStopsAreNamed) {
  EXPECT_THAT(StopStrings::create({"a", ""}).message(), HasSubstr("stop string 1"));
  EXPECT_THAT(StopStrings::create({std::string(1025, 'a')}).message(), HasSubstr("1025"));
  EXPECT_TRUE(StopStrings::create({std::string(1024, 'a')}).ok());
  EXPECT_THAT(StopStrings::create(std::vector<std::string>(17, "a")).message(), HasSubstr("17"));
}

}  // namespace
}  // namespace tandem
