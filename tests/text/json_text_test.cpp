#include "text/json_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem {
namespace {

using ::testing::HasSubstr;

std::string spaced(std::string_view text) {
  return dump_json(parse_json(text).value_or_throw(), JsonStyle::kSpaced);
}
std::string compact(std::string_view text) {
  return dump_json(parse_json(text).value_or_throw(), JsonStyle::kCompactSorted);
}

// Right column: json.dumps(json.loads(left)) of CPython 3.11.
TEST(JsonText, NumbersAreSpelledAsPythonDoes) {
  const std::pair<const char*, const char*> cases[] = {
      {"0", "0"},
      {"-0", "0"},
      {"-0.0", "-0.0"},
      {"-12", "-12"},
      {"100.0", "100.0"},
      {"2.50", "2.5"},
      {"0.1", "0.1"},
      {"1E5", "100000.0"},
      {"1e15", "1000000000000000.0"},
      {"1e16", "1e+16"},
      {"1e22", "1e+22"},
      {"0.0001", "0.0001"},
      {"0.00001", "1e-05"},
      {"1.5e-7", "1.5e-07"},
      {"1e-320", "1e-320"},
      {"5e-324", "5e-324"},
      {"1.7976931348623157e308", "1.7976931348623157e+308"},
      {"9007199254740993.0", "9007199254740992.0"},
      {"123456.789e3", "123456789.0"},
      {"18446744073709551615", "18446744073709551615"},
      {"-9223372036854775809", "-9223372036854775809"},
      {"18446744073709551616", "18446744073709551616"},
      {"123456789012345678901234567890", "123456789012345678901234567890"},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(spaced(text), expected);
  }
}

TEST(JsonText, SeparatorsOrderAndEscapes) {
  const char* text =
      R"({"b": "\u00e9\n\u0001\u007f\/\"\\", "a": [1,{"z":null,"y":true}] , "":{}, "c":[]})";
  EXPECT_EQ(
      spaced(text),
      "{\"b\": \"é\\n\\u0001\x7F/\\\"\\\\\", \"a\": [1, {\"z\": null, \"y\": true}], \"\": {}, "
      "\"c\": []}");
  EXPECT_EQ(
      compact(text),
      "{\"\":{},\"a\":[1,{\"y\":true,\"z\":null}],\"b\":\"é\\n\\u0001\x7F/\\\"\\\\\",\"c\":[]}");
}

TEST(JsonText, KeysSortByCodePoint) {
  // U+FF5E sorts before U+1F389, although its UTF-16 unit is the larger one.
  EXPECT_EQ(compact(R"({"🎉":1,"～":2,"Z":3,"a":4})"), R"({"Z":3,"a":4,"～":2,"🎉":1})");
}

TEST(JsonText, RepeatedKeysKeepTheFirstPlaceAndTheLastValue) {
  EXPECT_EQ(spaced(R"({"a": 1, "b": 2, "a": 3, "c": 4, "b": 5})"), R"({"a": 3, "b": 5, "c": 4})");
}

TEST(JsonText, BadTextsAreFailures) {
  for (const char* text : {"", " ", "{", "{\"a\":}", "[1,]", "01", "NaN", "1e999", "\"\xFF\"",
                           "\"\\ud800\"", "{} {}", "'a'"}) {
    const auto node = parse_json(text);
    ASSERT_FALSE(node.ok()) << text;
    EXPECT_THAT(node.message(), HasSubstr("not JSON: ")) << text;
    EXPECT_GT(node.message().size(), std::string("not JSON: ").size()) << text;
  }
}

TEST(JsonText, DepthIsBounded) {
  const auto nested = [](std::size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(parse_json(nested(256)).ok());
  EXPECT_THAT(parse_json(nested(257)).message(), HasSubstr("nested deeper than 256"));
  EXPECT_FALSE(parse_json(std::string(1'000'000, '[')).ok());
}

}  // namespace
}  // namespace tandem
