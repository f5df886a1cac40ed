#include "text/grammar/json_schema.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "text/grammar/grammar_session.h"
#include "text/grammar/schema_validator.h"

namespace tandem {
namespace {

using testing::GrammarSession;
using ::testing::HasSubstr;
using testing::SchemaValidator;

const GrammarSession& session() {
  static const GrammarSession kSession;
  return kSession;
}

std::shared_ptr<const Grammar> compile(const std::string& schema,
                                       SchemaDefaults defaults = SchemaDefaults::kOpen) {
  auto grammar = compile_json_schema(schema, {}, defaults);
  EXPECT_TRUE(grammar.ok()) << schema << ": " << (grammar.ok() ? "" : grammar.message());
  return std::move(grammar).value_or_throw();
}

std::string quoted(std::size_t length) {
  return fmt::format("\"{}\"", std::string(length, 'a'));
}

struct Row {
  std::string schema;
  std::vector<std::string> yes;
  std::vector<std::string> no;
};

void expect_rows(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    const auto grammar = compile(row.schema);
    for (const std::string& text : row.yes) {
      EXPECT_TRUE(session().matches(*grammar, text)) << row.schema << " on " << text;
    }
    for (const std::string& text : row.no) {
      EXPECT_FALSE(session().matches(*grammar, text)) << row.schema << " on " << text;
    }
  }
}

TEST(GrammarSchema, Scalars) {
  expect_rows({
      {R"({"type":"null"})", {"null"}, {"nul", "true", " null", "null "}},
      {R"({"type":"boolean"})", {"true", "false"}, {"0", "null"}},
      {R"({"type":"number"})",
       {"0", "-0", "12", "-1.50", "1e5", "2.5E-07", "123456789012345678"},
       {"01", ".5", "1.", "+1", "1e", "1e123", "--1", "1234567890123456789", "NaN"}},
      {R"({"type":"integer"})", {"0", "-7", "100"}, {"-0", "1.0", "1e2", "007", "-"}},
      {R"({"type":["string","null"]})", {"\"\"", "null"}, {"1", "[]"}},
      {R"({"enum":["a\"b", 1, null, [1,{"x":2}], 1.50]})",
       {R"("a\"b")", "1", "null", R"([1,{"x":2}])", R"([1, {"x": 2}])", "1.5"},
       {"\"a\"", "2", "[1]", "1.50"}},
      {R"({"type":"string","enum":["a", 1]})", {"\"a\""}, {"1"}},
      {R"({"const":{"a":[]}})", {R"({"a":[]})", "{\n  \"a\": []\n}"}, {R"({"a": [1]})", "{}"}},
      {R"({"enum":["a","b"],"const":"b"})", {"\"b\""}, {"\"a\""}},
      {"true", {"1", "{}", "[null, {\"a\": \"b\"}]"}, {"", "tru", "{a:1}"}},
      {"{}", {"1", "\"x\""}, {"x"}},
  });
}

TEST(GrammarSchema, Strings) {
  expect_rows({
      {R"({"type":"string"})",
       {R"("")", R"("a\n\u00e4\\\"\/")", "\"日\U0001F389\"", R"("\ud83c\udf89")"},
       {"\"", "\"a\nb\"", R"("\x")", R"("\u12")", R"("\ud800")", R"("\udc00\ud800")",
        R"("\ud800x")", "\"\xFF\"", "\"\xE6\x97\"", "\"\x01\"", "\"\xED\xA0\x80\""}},
      {R"({"type":"string","minLength":2,"maxLength":3})",
       {R"("ab")", R"("日本語")", R"("\u00e4\ud83c\udf89\"")"},
       {R"("a")", R"("abcd")", R"("")"}},
      {R"({"maxLength":0})", {"\"\""}, {"\"a\"", "1"}},
      {R"({"minLength":100000})", {quoted(100'000)}, {"\"a\""}},
      {R"({"type":"string","pattern":"^a+$"})", {R"("aa")"}, {R"("")", R"("ab")", R"("\u0061")"}},
      {R"({"type":"string","pattern":"b"})", {R"("abc")", R"("b")"}, {R"("ac")"}},
      {R"({"type":"string","pattern":"^.$"})",
       {R"("\"")", R"("\\")", R"("/")", R"("\t")", R"("\u0001")", "\"日\""},
       {R"("\n")", R"(""")", R"("\")", R"("aa")"}},
      {R"({"type":"string","pattern":"^\\d+$","minLength":2,"maxLength":3})",
       {R"("12")", R"("123")"},
       {R"("1")", R"("1234")", R"("1a")"}},
      {R"({"allOf":[{"pattern":"^a"},{"pattern":"z$"}]})", {R"("az")", R"("a z")"}, {R"("a")"}},
      {R"({"type":"string","format":"date"})",
       {R"("2024-02-29")", R"("1999-12-31")", R"("2000-02-29")"},
       {R"("2023-02-29")", R"("1900-02-29")", R"("2024-04-31")", R"("2024-13-01")", R"("24-1-1")"}},
      {R"({"type":"string","format":"date-time"})",
       {R"("2024-02-29T23:59:59Z")", R"("2024-01-01T00:00:00.123+05:30")"},
       {R"("2024-02-29")", R"("2024-01-01T24:00:00Z")", R"("2024-01-01T00:00:00")"}},
      {R"({"type":"string","format":"time"})", {R"("01:02:03Z")"}, {R"("1:2:3Z")"}},
      {R"({"type":"string","format":"uuid"})",
       {R"("123e4567-e89b-12d3-a456-426614174000")"},
       {R"("123e4567e89b12d3a456426614174000")"}},
      {R"({"type":"string","format":"email"})",
       {R"("a.b+c@x-y.example.org")"},
       {R"("a@b")", R"("@x.de")", R"("a..b@x.de")", R"("a@-x.de")"}},
      {R"({"type":"string","format":"ipv4"})", {R"("192.168.0.1")"}, {R"("256.1.1.1")"}},
  });
}

TEST(GrammarSchema, IntegerBoundsAreExact) {
  const auto check = [](const std::string& schema, std::int64_t low, std::int64_t high) {
    const auto grammar = compile(schema);
    for (std::int64_t value = -1300; value <= 1300; ++value) {
      ASSERT_EQ(session().matches(*grammar, std::to_string(value)), low <= value && value <= high)
          << schema << " on " << value;
    }
  };
  check(R"({"type":"integer","minimum":-12,"maximum":1042})", -12, 1042);
  check(R"({"type":"integer","exclusiveMinimum":9,"exclusiveMaximum":11})", 10, 10);
  check(R"({"type":"integer","minimum":0.5,"maximum":99.9})", 1, 99);
  check(R"({"type":"integer","exclusiveMinimum":-100.5,"maximum":-1})", -100, -1);
  check(R"({"type":"integer","minimum":1})", 1, 5000);
  check(R"({"type":"integer","maximum":999,"allOf":[{"minimum":-1}]})", -1, 999);
  check(R"({"type":"integer","minimum":1e3})", 1000, 5000);
  Rng rng(3);
  for (int round = 0; round < 30; ++round) {
    std::int64_t low = static_cast<std::int64_t>(rng.below(2400)) - 1200;
    std::int64_t high = static_cast<std::int64_t>(rng.below(2400)) - 1200;
    if (low > high) {
      std::swap(low, high);
    }
    check(fmt::format(R"({{"type":"integer","minimum":{},"maximum":{}}})", low, high), low, high);
  }
  expect_rows({{R"({"type":"integer","minimum":9223372036854775807})",
                {"9223372036854775807"},
                {"9223372036854775806", "9223372036854775808"}},
               {R"({"type":"integer","maximum":-9223372036854775808})",
                {"-9223372036854775808"},
                {"-9223372036854775807", "0"}}});
}

TEST(GrammarSchema, NumberBoundsAreExact) {
  const std::vector<std::string> texts = {
      "0",     "0.0",   "0.5",   "0.50", "0.500001", "0.49", "-0.5", "-0.51",   "1",    "1.0",
      "1.25",  "1.250", "1.2",   "1.3",  "1.24999",  "9",    "10",   "10.0",    "10.1", "9.999",
      "-1.25", "-1.3",  "-1.24", "-10",  "-9.99",    "99",   "100",  "-100.001"};
  const std::vector<std::string> bounds = {"0", "0.5", "1.25", "10", "-0.5", "-1.25", "-10", "1e1"};
  const auto check = [&](const std::string& schema, const auto& is_valid) {
    const auto grammar = compile_json_schema(schema);
    for (const std::string& text : texts) {
      ASSERT_EQ(grammar.ok() && session().matches(**grammar, text), is_valid(std::stod(text)))
          << schema << " on " << text;
    }
  };
  for (const std::string& low : bounds) {
    const double a = std::stod(low);
    check(fmt::format(R"({{"type":"number","minimum":{}}})", low),
          [&](double x) { return x >= a; });
    check(fmt::format(R"({{"type":"number","exclusiveMinimum":{}}})", low),
          [&](double x) { return x > a; });
    for (const std::string& high : bounds) {
      const double b = std::stod(high);
      check(fmt::format(R"({{"type":"number","minimum":{},"maximum":{}}})", low, high),
            [&](double x) { return x >= a && x <= b; });
      check(fmt::format(R"({{"minimum":{},"allOf":[{{"exclusiveMaximum":{}}}]}})", low, high),
            [&](double x) { return x >= a && x < b; });
    }
  }
  expect_rows({{R"({"type":["number","null"],"minimum":0,"maximum":1})",
                {"0.7", "1", "null"},
                {"1e-1", "00.5", "1.", ".5", "2"}}});
}

TEST(GrammarSchema, Arrays) {
  expect_rows({
      {R"({"type":"array","items":{"type":"integer"}})",
       {"[]", "[ ]", "[1]", "[1,2]", "[1, 2]", "[\n  1,\n  2\n]"},
       {"[1,]", "[,1]", "[1  ]", "[1 2]", "[\"a\"]", "[\n\n1]"}},
      {R"({"items":{"type":"null"},"minItems":2,"maxItems":3})",
       {"[null,null]", "[null,null,null]"},
       {"[]", "[null]", "[null,null,null,null]", "null"}},
      {R"({"type":"array","maxItems":0})", {"[]"}, {"[1]"}},
      {R"({"type":"array","minItems":1})", {"[[]]"}, {"[]"}},
      {R"({"prefixItems":[{"const":1},{"const":2}],"items":false})",
       {"[]", "[1]", "[1,2]"},
       {"[2]", "[1,2,3]"}},
      {R"({"prefixItems":[{"const":1},{"const":2}],"items":{"const":3},"minItems":3,"maxItems":4})",
       {"[1,2,3]", "[1,2,3,3]"},
       {"[1,2]", "[1,2,3,3,3]", "[1,2,4]"}},
      {R"({"prefixItems":[{"const":1}],"minItems":1,"maxItems":1})", {"[1]"}, {"[]", "[1,1]"}},
      {R"({"allOf":[{"prefixItems":[{"minimum":0}]},{"items":{"type":"integer","maximum":5}}]})",
       {"[3]", "[0,-7]"},
       {"[-1]", "[6]", "[1,6]"}},
  });
}

TEST(GrammarSchema, Objects) {
  expect_rows({
      {R"({"type":"object"})",
       {"{}", R"({"a":1})", R"({"a": {"b": []}, "a": 2})", "{ }"},
       {"{", R"({"a"})", R"({a:1})", R"({"a":1,})"}},
      {R"({"properties":{"a":{"type":"integer"},"b":{"type":"null"},"c":{"type":"boolean"}},
          "required":["b"],"additionalProperties":false})",
       {R"({"a":1,"b":null,"c":true})", R"({"b":null})", R"({"b": null, "c": false})"},
       {R"({"a":1})", R"({"b":null,"a":1})", R"({"b":null,"x":1})", "{}",
        R"({"a":1,"a":1,"b":null})"}},
      {R"({"properties":{"ab":{"const":1}},"additionalProperties":{"const":2}})",
       {"{}", R"({"ab":1,"a":2,"abc":2,"":2})", R"({"x\n\"":2})", R"({"b":2})"},
       {R"({"ab":2})", R"({"a":1})", R"({"a":2,"ab":1})", R"({"\u0061b":2})"}},
      {R"({"type":"object","required":["z"],"properties":{"y":{"const":1}}})",
       {R"({"y":1,"z":[0]})", R"({"z":null,"o":1})"},
       {R"({"y":1})", R"({"z":1,"y":1})"}},
      {R"({"properties":{"a\"\\\u0001/":{"const":1}},"additionalProperties":false})",
       {R"({"a\"\\\u0001/":1})"},
       {R"({"a":1})"}},
      {R"({"allOf":[{"properties":{"a":{"type":"integer"}},"required":["a"]},
                    {"properties":{"b":{"type":"null"},"a":{"minimum":3}}}],
          "additionalProperties":{"type":["integer","null"]}})",
       {R"({"a":3,"b":null,"c":0})"},
       {R"({"a":2})", R"({"b":null})", R"({"a":3,"c":""})"}},
  });
  const auto closed = compile(R"({"properties":{"a":{"const":1}}})", SchemaDefaults::kClosed);
  EXPECT_TRUE(session().matches(*closed, R"({"a":1})"));
  EXPECT_FALSE(session().matches(*closed, R"({"a":1,"b":2})"));
}

TEST(GrammarSchema, CombinationsAndReferences) {
  expect_rows({
      {R"({"anyOf":[{"type":"integer"},{"const":"x"}]})", {"1", "\"x\""}, {"null", "\"y\""}},
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", {"1", "1.5"}, {"\"\""}},
      {R"({"type":"object","properties":{"a":{"const":1},"b":{"const":2}},
          "additionalProperties":false,"anyOf":[{"required":["a"]},{"required":["b"]}]})",
       {R"({"a":1})", R"({"b":2})", R"({"a":1,"b":2})"},
       {"{}"}},
      {R"({"anyOf":[{"minimum":5},{"maximum":-5}],"oneOf":[{"type":"integer"},{"type":"null"}]})",
       {"5", "-6"},
       {"0", "5.5"}},
      {R"({"$defs":{"t":{"type":"object","properties":{"v":{"type":"integer"},
              "kids":{"type":"array","items":{"$ref":"#/$defs/t"}}},"required":["v"],
              "additionalProperties":false}},"$ref":"#/$defs/t"})",
       {R"({"v":1})", R"({"v":1,"kids":[{"v":2},{"v":3,"kids":[{"v":4,"kids":[]}]}]})"},
       {R"({"kids":[]})", R"({"v":1,"kids":[{"kids":[]}]})", R"({"v":1,"kids":[{"v":1}})"}},
      {R"({"properties":{"next":{"$ref":"#"}},"additionalProperties":false})",
       {"{}", R"({"next":{"next":{}}})"},
       {R"({"next":1})"}},
      {R"({"$defs":{"a/b~c d":{"const":1}},"$ref":"#/$defs/a~1b~0c%20d"})", {"1"}, {"2"}},
      {R"({"$defs":{"i":{"type":"integer"}},"$ref":"#/$defs/i","minimum":3})", {"3"}, {"2"}},
      {R"({"anyOf":[{"$ref":"#"},{"type":"null"}]})", {"null"}, {"1"}},
      {R"({"anyOf":[false,{"const":1}]})", {"1"}, {"2"}},
      {R"({"properties":{"a":false}})", {"{}", R"({"b":1})"}, {R"({"a":1})"}},
      // Both alternatives stay open until the last value, on each of many levels.
      {R"({"$defs":{"x":{"anyOf":[
            {"properties":{"l":{"$ref":"#/$defs/x"},"e":{"const":1}},"additionalProperties":false},
            {"properties":{"l":{"$ref":"#/$defs/x"},"e":{"const":2}},"additionalProperties":false}
          ]}},"$ref":"#/$defs/x"})",
       {[] {
         std::string text = "{}";
         for (int i = 0; i < 60; ++i) {
           text = fmt::format(R"({{"l":{},"e":{}}})", text, 1 + i % 2);
         }
         return text;
       }()},
       {R"({"l":{"e":3}})"}},
  });
}

TEST(GrammarSchema, ErrorsNameThePlace) {
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"", "not JSON"},
      {"[1", "not JSON"},
      {"[]", "#: expected a schema"},
      {R"({"properties":{"a":{"not":{}},"b":{"multipleOf":2}},"if":{}})",
       "not supported: #/properties/a/not, #/properties/b/multipleOf, #/if"},
      {R"({"uniqueItems":true})", "not supported: #/uniqueItems"},
      {R"({"format":"iri"})", "not supported: #/format \"iri\""},
      {R"({"frobnicate":1})", "#/frobnicate"},
      {R"({"items":[{}]})", "#/items: expected a schema"},
      {R"({"type":"text"})", "#/type: expected one of null, boolean"},
      {R"({"type":[]})", "#/type"},
      {R"({"enum":[]})", "#/enum: expected a list"},
      {R"({"anyOf":{}})", "#/anyOf: expected a list of schemas"},
      {R"({"properties":{"a/b":{"properties":3}}})", "#/properties/a~1b/properties: expected"},
      {R"({"required":["a",1]})", "#/required: expected a list of strings"},
      {R"({"minItems":-1})", "#/minItems: expected a whole number"},
      {R"({"maxLength":1.5})", "#/maxLength: expected a whole number"},
      {R"({"maxLength":99999999999})", "#/maxLength: expected a whole number"},
      {R"({"minimum":"1"})", "#/minimum: expected a number"},
      {R"({"type":"number","minimum":1e20})", "#: minimum of a number: at most 18 digits"},
      {R"({"pattern":"a("})", "#/pattern: at byte 2: expected )"},
      {R"({"pattern":"(?=a)b"})", "#/pattern: at byte 2: lookaround"},
      {R"({"$ref":"#/$defs/x"})", "#/$ref: \"#/$defs/x\" names no schema"},
      {R"({"$ref":"http://x/y"})", "names no schema"},
      {R"({"$ref":"#/properties","properties":{}})", "names no schema"},
      {R"({"$ref":"#"})", "#: the schema refers to itself"},
      {R"({"allOf":[{"$ref":"#"}]})", "refers to itself"},
      {R"({"enum":["a"],"minLength":1})", "#: minLength beside enum"},
      {"false", "no text can match"},
      {R"({"type":"integer","minimum":3,"maximum":2})", "no text can match"},
      {R"({"type":"array","minItems":3,"maxItems":2})", "no text can match"},
      {R"({"type":"string","minLength":3,"maxLength":2})", "no text can match"},
      {R"({"type":"string","pattern":"^a$","minLength":2})", "no text can match"},
      {R"({"properties":{"a":false},"required":["a"]})", "no text can match"},
      {R"({"properties":{"a":{"$ref":"#"}},"required":["a"]})", "no text can match"},
      {R"({"type":"string","const":1})", "no text can match"},
      {R"({"allOf":[{"type":"string"},{"type":"null"}]})", "no text can match"},
  };
  for (const auto& [schema, message] : rows) {
    const auto grammar = compile_json_schema(schema);
    ASSERT_FALSE(grammar.ok()) << schema;
    EXPECT_THAT(grammar.message(), HasSubstr(message)) << schema;
  }
}

TEST(GrammarSchema, LimitsEndEveryCompilation) {
  std::string deep = "{}";
  for (int i = 0; i < 70; ++i) {
    deep = fmt::format(R"({{"items":{}}})", deep);
  }
  EXPECT_THAT(compile_json_schema(deep).message(), HasSubstr("nested deeper than 64"));
  std::string bushy;
  for (int i = 0; i < 25; ++i) {  // 2^25 combinations
    bushy += fmt::format(R"({}{{"anyOf":[{{"minLength":{}}},{{"maxLength":{}}}]}})", i ? "," : "",
                         i, i + 100);
  }
  const GrammarLimits small{.max_states = 20'000};
  EXPECT_THAT(compile_json_schema(fmt::format(R"({{"allOf":[{}]}})", bushy), small).message(),
              HasSubstr("states"));
  EXPECT_FALSE(compile_json_schema(R"({"pattern":"(a|b)*a(a|b){40}"})", small).ok());
  EXPECT_FALSE(compile_json_schema(R"({"pattern":"^a","maxLength":1000000})", small).ok());
  std::string chain;
  for (int i = 0; i < 5000; ++i) {
    chain += fmt::format(R"("d{}":{{"$ref":"#/$defs/d{}"}},)", i, i + 1);
  }
  EXPECT_THAT(compile_json_schema(
                  fmt::format(R"({{"$ref":"#/$defs/d0","$defs":{{{}"d5000":{{}}}}}})", chain))
                  .message(),
              HasSubstr("references in a row"));
  EXPECT_FALSE(compile_json_schema(std::string(100'000, '[')).ok());
  EXPECT_THAT(compile_json_schema(std::string(300'000, ' ')).message(), HasSubstr("300000 bytes"));
}

// Whatever is drawn from the masks parses and is valid, and a mask never runs dry.
TEST(GrammarSchema, RandomWalksGiveValidDocuments) {
  const std::vector<std::string> schemas = {
      "true",
      R"({"type":"object"})",
      R"({"type":"array","items":{"type":["number","null"]},"minItems":2,"maxItems":5})",
      R"({"properties":{"name":{"type":"string","maxLength":5},"id":{"type":"integer","minimum":-20,
          "maximum":345},"tags":{"items":{"enum":["ab","abc","\"",12]}}},"required":["id"],
          "additionalProperties":false})",
      R"({"properties":{"ab":{"type":"boolean"}},"additionalProperties":{"type":"string","pattern":
          "^[abc]+(e1|[0-9]{2})$"}})",
      R"({"$defs":{"t":{"type":"object","properties":{"value":{"type":"integer"},"kids":{"type":
          "array","items":{"$ref":"#/$defs/t"},"maxItems":2}},"required":["value"],
          "additionalProperties":false}},"$ref":"#/$defs/t"})",
      R"({"anyOf":[{"type":"string","minLength":3},{"prefixItems":[{"type":"null"},true],
          "items":false,"minItems":1},{"properties":{"id":{"const":"x"}},"required":["id"]}]})",
      R"({"type":"string","minLength":1,"maxLength":4,"pattern":"a|[0-9]"})",
      R"({"allOf":[{"properties":{"id":{"type":"integer"}}},{"properties":{"id":{"minimum":1},
          "name":{}},"required":["name","id"]}],"type":"object"})",
  };
  Rng rng(21);
  for (const std::string& schema : schemas) {
    const auto grammar = compile(schema);
    const SchemaValidator validator(SchemaValidator::Json::parse(schema));
    int finished = 0;
    for (int round = 0; round < 60; ++round) {
      const auto walk = session().walk(*grammar, rng, false, round < 20 ? 5 : 30);
      ASSERT_EQ(walk.problem, "") << schema;
      if (walk.finished) {
        ++finished;
        const auto value = SchemaValidator::Json::parse(walk.text, nullptr, false);
        ASSERT_FALSE(value.is_discarded()) << schema << " gave " << walk.text;
        ASSERT_TRUE(validator.is_valid(value)) << schema << " gave " << walk.text;
      }
    }
    EXPECT_GT(finished, 5) << schema;
  }
}

}  // namespace
}  // namespace tandem
