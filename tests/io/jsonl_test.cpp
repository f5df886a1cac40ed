#include "io/jsonl.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/io_support.h"

namespace tandem {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

const JsonlKeys kKeys{.input_key = "q", .label_key = "a"};

std::string refusal(std::string_view text) {
  const auto records = parse_jsonl("data.jsonl", text, kKeys);
  EXPECT_FALSE(records.ok()) << text;
  return records.ok() ? "" : records.message();
}

TEST(Jsonl, ReadsRecordsWithTheirLines) {
  const auto records = parse_jsonl(
      "data.jsonl", "{\"q\":\"x\",\"a\":\"1\"}\n\n  \t\r\n{\"a\":\"2\",\"extra\":[1],\"q\":\"y\"}",
      kKeys);
  ASSERT_TRUE(records.ok()) << records.message();
  EXPECT_THAT(*records, ElementsAre(PromptRecord{"x", "1", 1}, PromptRecord{"y", "2", 4}));
}

TEST(Jsonl, LastNewlineIsOptional) {
  const std::string line = "{\"q\":\"x\",\"a\":\"1\"}";
  for (const std::string& text : {line, line + "\n", line + "\r\n", line + "\n\n"}) {
    const auto records = parse_jsonl("data.jsonl", text, kKeys);
    ASSERT_TRUE(records.ok()) << records.message();
    EXPECT_THAT(*records, ElementsAre(PromptRecord{"x", "1", 1}));
  }
  EXPECT_THAT(*parse_jsonl("data.jsonl", "", kKeys), IsEmpty());
  EXPECT_THAT(*parse_jsonl("data.jsonl", "\n\n", kKeys), IsEmpty());
}

// U+2028, U+2029, U+0085, vertical tab and form feed end lines for some readers; here they are
// data.
TEST(Jsonl, OnlyNewlineEndsALine) {
  const std::string odd =
      "a\xE2\x80\xA8"
      "b\xE2\x80\xA9"
      "c\xC2\x85"
      "d";
  const auto records = parse_jsonl(
      "data.jsonl",
      "{\"q\":\"" + odd + "\",\"a\":\"\\u2028\\u000b\\f\"}\n{\"q\":\"\",\"a\":\"\"}\n", kKeys);
  ASSERT_TRUE(records.ok()) << records.message();
  EXPECT_THAT(*records,
              ElementsAre(PromptRecord{odd, "\xE2\x80\xA8\x0B\x0C", 1}, PromptRecord{"", "", 2}));
}

TEST(Jsonl, ErrorsNameFileLineAndKey) {
  const std::string good = "{\"q\":\"x\",\"a\":\"1\"}\n";
  EXPECT_THAT(refusal(good + "\n{\"q\":\"x\"}\n"),
              AllOf(StartsWith("data.jsonl:3: "), HasSubstr("key \"a\": missing")));
  EXPECT_THAT(
      refusal(good + "{\"q\":7,\"a\":\"1\"}"),
      AllOf(StartsWith("data.jsonl:2: "), HasSubstr("key \"q\": expected a string, found number")));
  EXPECT_THAT(refusal("{\"q\":null,\"a\":\"1\"}"), HasSubstr("found null"));
  EXPECT_THAT(refusal(good + "{\"q\":\"x\",\n\"a\":\"1\"}"),
              AllOf(StartsWith("data.jsonl:2: "), HasSubstr("bad JSON")));
  EXPECT_THAT(refusal("[\"x\",\"1\"]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(refusal("{\"q\":\"x\",\"a\":\"1\",\"q\":\"y\"}"), HasSubstr("duplicate key \"q\""));
  EXPECT_THAT(refusal("{\"q\":\"\xFF\",\"a\":\"1\"}"), HasSubstr("bad JSON"));
  EXPECT_THAT(refusal("\xEF\xBB\xBF" + good), HasSubstr("byte order mark"));
  EXPECT_THAT(refusal(good + std::string(1, '\0')),
              AllOf(StartsWith("data.jsonl:2: "), HasSubstr("NUL")));
  EXPECT_THAT(refusal("{\"q\":" + std::string(1'000'000, '[')), HasSubstr("nested deeper"));
  EXPECT_THAT(refusal("{\"q\":\"x\",\"a\":\"1\"} {}"), HasSubstr("bad JSON"));
}

TEST(Jsonl, LoadsFromAFile) {
  const test::TempDir dir;
  test::write_text(dir.file("d.jsonl"), "{\"question\":\"x\",\"answer\":\"1\"}\nx");
  EXPECT_THAT(load_jsonl(dir.file("d.jsonl"), {}).message(),
              StartsWith(dir.file("d.jsonl") + ":2: "));
  EXPECT_THAT(load_jsonl(dir.file("none.jsonl"), {}).message(),
              HasSubstr("none.jsonl: cannot open"));
  test::write_text(dir.file("empty.jsonl"), "");
  EXPECT_THAT(*load_jsonl(dir.file("empty.jsonl"), {}), IsEmpty());
}

TEST(Jsonl, Gsm8kLoadsCompletely) {
  // The data set is never copied into the project; it lies beside a checkout or beside a folder of
  // worktrees.
  for (const char* shared : {"/../shared", "/../../shared"}) {
    const std::string dir = std::string(TDM_SOURCE_DIR) + shared + "/data/gsm8k/";
    if (!std::filesystem::exists(dir + "train.jsonl")) {
      continue;
    }
    const auto train = load_jsonl(dir + "train.jsonl", {});
    const auto test = load_jsonl(dir + "test.jsonl", {});
    ASSERT_TRUE(train.ok()) << train.message();
    ASSERT_TRUE(test.ok()) << test.message();
    EXPECT_EQ(train->size(), 7473U);
    EXPECT_EQ(test->size(), 1319U);
    for (const auto& record : *train) {
      ASSERT_THAT(record.label, HasSubstr("\n#### ")) << record.line;
    }
    return;
  }
  GTEST_SKIP() << "GSM8K is not present beside the checkout (shared/data/gsm8k)";
}

}  // namespace
}  // namespace tandem
