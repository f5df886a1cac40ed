// Reading fields of a request: types, ranges, null, and paths in messages.
#include "server/api/fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem::server {
namespace {

using ::testing::HasSubstr;

HttpRequest request_with(std::string body, std::string type = "application/json") {
  HttpRequest request;
  request.body = std::move(body);
  request.headers.push_back({"Content-Type", std::move(type)});
  return request;
}

ApiError problem_of(const std::string& body) {
  Problem problem;
  (void)parse_body(request_with(body), false, problem);
  return problem ? problem.error() : ApiError{0, "", "", ""};
}

TEST(ParseBody, OnlyStrictJson) {
  struct Case {
    std::string body;
    std::string message;
  };
  const std::vector<Case> cases{
      {"", "empty"},
      {"{", "at byte 1"},
      {"{} x", "at byte 3"},
      {"{\"a\":1,\"a\":2}", "before byte 10: duplicate key \"a\""},
      {"{\"a\":{\"b\":1,\"\\u0062\":2}}", "duplicate key \"b\""},
      {"{\"a\":\"\xFF\"}", "at byte 6"},
      {"{\"a\":\"\\ud800\"}", "surrogate"},
      {"{\"a\":NaN}", "at byte 5"},
      {"{\"a\":Infinity}", "at byte 5"},
      {"{\"a\":1e999}", "before byte 11"},
      {"{\"a\":" + std::string(200, '['), "at byte 132: nested deeper than 128"},
      {std::string("{\"a\":1\0}", 8), "at byte 6"},
      {"\xEF\xBB\xBF{}", "byte order mark"},
      {"[1]", "a list: expected a JSON object"},
      {"3", "expected a JSON object"},
      {"{'a':1}", "at byte 1"},
  };
  for (const Case& test : cases) {
    const ApiError error = problem_of(test.body);
    EXPECT_EQ(error.status, 400) << test.body;
    EXPECT_THAT(error.message, HasSubstr(test.message)) << test.body;
  }
  EXPECT_EQ(problem_of("{\"a\": [1, 2.5, null, \"\\u00e9\"]}").status, 0);
}

TEST(ParseBody, ContentTypes) {
  const auto status = [](const std::string& type) {
    Problem problem;
    (void)parse_body(request_with("{}", type), false, problem);
    return problem ? problem.error().status : 200;
  };
  EXPECT_EQ(status("application/json"), 200);
  EXPECT_EQ(status("Application/JSON; charset=utf-8"), 200);
  EXPECT_EQ(status("text/plain"), 415);
  EXPECT_EQ(status("application/x-www-form-urlencoded"), 415);
  EXPECT_EQ(status(""), 415);
  Problem problem;
  EXPECT_TRUE(parse_body(HttpRequest(), true, problem).empty());
  EXPECT_FALSE(problem);
}

/// Reads one field of {"f": VALUE} with `read`; the problem's message, or "".
template <typename Read>
std::string message_for(const std::string& value, Read read) {
  const Json object = Json::parse("{\"f\":" + value + "}");
  Problem problem;
  read(FieldReader(object, problem, "a[1]."));
  if (!problem) {
    return "";
  }
  EXPECT_EQ(problem.error().status, 400);
  EXPECT_THAT(problem.error().param, ::testing::StartsWith("a[1].f"));
  EXPECT_THAT(problem.error().message, HasSubstr(problem.error().param));
  return problem.error().message;
}

TEST(FieldReader, Integers) {
  const auto read = [](const FieldReader& fields) {
    const std::int64_t value = fields.integer("f", 7, {0, 10});
    if (!fields.has("f")) {
      EXPECT_EQ(value, 7);
    } else if (!fields.problem()) {
      EXPECT_EQ(value, 5);
    }
  };
  for (const char* good : {"5", "5.0", "null"}) {
    EXPECT_EQ(message_for(good, read), "") << good;
  }
  for (const char* bad : {"5.5", "\"5\"", "true", "[]", "{}", "-1", "11", "1e30", "5e-1",
                          "18446744073709551615", "-9223372036854775808", "1e15"}) {
    EXPECT_THAT(message_for(bad, read), HasSubstr("a whole number from 0 to 10")) << bad;
  }
}

TEST(FieldReader, NumbersBooleansAndStrings) {
  const auto number = [](const FieldReader& f) { (void)f.number("f", 1, {0, 2, true}); };
  for (const char* good : {"1", "0.5", "2", "null"}) {
    EXPECT_EQ(message_for(good, number), "") << good;
  }
  for (const char* bad : {"0", "-1", "2.1", "\"1\"", "true", "[1]"}) {
    EXPECT_THAT(message_for(bad, number), HasSubstr("a number in (0, 2]")) << bad;
  }
  const auto boolean = [](const FieldReader& f) { (void)f.boolean("f", true); };
  EXPECT_EQ(message_for("false", boolean), "");
  for (const char* bad : {"0", "1", "\"true\"", "{}"}) {
    EXPECT_THAT(message_for(bad, boolean), HasSubstr("true or false")) << bad;
  }
  const auto string = [](const FieldReader& f) { (void)f.string("f"); };
  EXPECT_EQ(message_for("\"x\"", string), "");
  EXPECT_THAT(message_for("3", string), HasSubstr("a string"));
  const auto strings = [](const FieldReader& f) { (void)f.strings("f"); };
  EXPECT_EQ(message_for("[\"x\",\"y\"]", strings), "");
  EXPECT_THAT(message_for("[\"x\",3]", strings), HasSubstr("a[1].f[1]"));
  EXPECT_THAT(message_for("{}", strings), HasSubstr("a list of strings"));
}

TEST(FieldReader, TokenIds) {
  const auto read = [](const FieldReader& f) { (void)f.token_ids("f", 10); };
  EXPECT_EQ(message_for("[0,9,3.0]", read), "");
  EXPECT_THAT(message_for("[0,10]", read), HasSubstr("a[1].f[1] is 10"));
  EXPECT_THAT(message_for("[-1]", read), HasSubstr("from 0 to 9"));
  EXPECT_THAT(message_for("[[1]]", read), HasSubstr("a[1].f[0] is a list"));
  EXPECT_THAT(message_for("7", read), HasSubstr("a list of token ids"));
}

TEST(FieldReader, TheFirstProblemStays) {
  const Json object = {{"a", "x"}, {"b", "y"}};
  Problem problem;
  const FieldReader fields(object, problem);
  (void)fields.integer("a", 0);
  (void)fields.integer("b", 0);
  EXPECT_EQ(problem.error().param, "a");
}

}  // namespace
}  // namespace tandem::server
