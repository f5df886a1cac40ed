#include "text/grammar/matcher.h"

#include <chrono>

#include <gtest/gtest.h>

#include "text/grammar/grammar_session.h"

namespace tandem {
namespace {

using testing::byte_id;
using testing::GrammarSession;

const GrammarSession& session() {
  static const GrammarSession kSession;
  return kSession;
}

const std::vector<std::string> kSchemas = {
    "true",
    R"({"type":"object","properties":{"name":{"type":"string"},"id":{"type":"integer"}},
        "required":["id"]})",
    R"({"items":{"items":{"properties":{"id":{"maxItems":3,"items":{"type":"string",
        "maxLength":6}}}}}})",
    R"({"type":"string","minLength":2,"maxLength":9})",
    R"({"anyOf":[{"properties":{"ab":{"type":"string"}},"additionalProperties":false},
        {"properties":{"abc":{"type":"string","pattern":"^abcd"}},"additionalProperties":false}]})",
    R"({"properties":{"kids":{"type":"array","items":{"$ref":"#"}}},"additionalProperties":false})",
};

// The heart of the matter: the cached, pruned walk says what trying every token says.
TEST(GrammarMatcher, MasksEqualTryingEveryToken) {
  Rng rng(8);
  for (const std::string& schema : kSchemas) {
    const auto grammar = compile_json_schema(schema).value_or_throw();
    for (int round = 0; round < 4; ++round) {
      const auto walk = session().walk(*grammar, rng, true, 12);
      ASSERT_EQ(walk.problem, "") << schema;
    }
  }
  for (const std::string& pattern :
       {std::string("(ab|abc)*(12|-1)?"), std::string("[^a]{2,5}(日|你)+z?"), std::string(".*")}) {
    const auto grammar = compile_regex(pattern).value_or_throw();
    for (int round = 0; round < 4; ++round) {
      const auto walk = session().walk(*grammar, rng, true, 8);
      ASSERT_EQ(walk.problem, "") << pattern;
    }
  }
}

TEST(GrammarMatcher, TheEndIsAllowedWhereTheTextMayEnd) {
  const auto grammar = compile_json_schema(R"({"type":"integer"})").value_or_throw();
  auto constraint = session().start(*grammar);
  EXPECT_TRUE(constraint->is_active());
  const std::int32_t stop = session().stops().front();
  EXPECT_FALSE(constraint->accept(stop));
  EXPECT_TRUE(constraint->accept(byte_id('1')));
  EXPECT_FALSE(constraint->is_complete());  // more digits may follow
  auto ids = session().allowed(*constraint);
  for (const std::int32_t id : session().stops()) {
    EXPECT_TRUE(std::find(ids.begin(), ids.end(), id) != ids.end());
  }
  EXPECT_TRUE(constraint->accept(stop));
  EXPECT_TRUE(constraint->is_complete());
  EXPECT_TRUE(session().allowed(*constraint).empty());
  EXPECT_FALSE(constraint->accept(byte_id('1')));

  const auto object = compile_json_object().value_or_throw();
  constraint = session().start(*object);
  EXPECT_TRUE(GrammarSession::accept_bytes(*constraint, "{}"));
  EXPECT_TRUE(constraint->is_complete());
  EXPECT_EQ(session().allowed(*constraint), session().stops());
}

TEST(GrammarMatcher, SpecialTokensAndBadIdsAreNeverText) {
  const auto grammar = compile_regex("[\\s\\S]*").value_or_throw();
  const auto constraint = session().start(*grammar);
  const std::int32_t first_special = session().tokenizer().special_id("[BOS]").value();
  const auto stops = session().stops();
  for (const std::int32_t id : session().allowed(*constraint)) {
    EXPECT_TRUE(id < first_special || std::find(stops.begin(), stops.end(), id) != stops.end());
  }
  for (const std::int32_t id :
       {first_special, session().tokenizer().special_id("<|open|>").value(), -1, 1'000'000}) {
    EXPECT_FALSE(constraint->accept(id)) << id;
  }
  // A refusal changes nothing, and the spelling of a special token is text.
  EXPECT_TRUE(GrammarSession::accept_bytes(*constraint, "<|open|>"));
}

TEST(GrammarMatcher, ARefusedTokenChangesNothing) {
  const auto grammar = compile_json_schema(R"({"const":"abab"})").value_or_throw();
  const auto constraint = session().start(*grammar);
  ASSERT_TRUE(GrammarSession::accept_bytes(*constraint, "\"ab"));
  const auto before = session().allowed(*constraint);
  const std::int32_t abc = session().tokenizer().encode("abc").front();
  EXPECT_FALSE(constraint->accept(abc));  // its first two bytes fit
  EXPECT_EQ(session().allowed(*constraint), before);
  EXPECT_TRUE(GrammarSession::accept_bytes(*constraint, "ab\""));
}

TEST(GrammarMatcher, ClonesAreIndependent) {
  const auto grammar =
      compile_json_schema(R"({"items":{"type":"array","items":{"const":"ab"}}})").value_or_throw();
  const auto constraint = session().start(*grammar);
  ASSERT_TRUE(GrammarSession::accept_bytes(*constraint, "[[\"ab\", \"a"));
  const auto before = session().allowed(*constraint);
  const auto draft = constraint->clone();
  EXPECT_EQ(session().allowed(*draft), before);
  ASSERT_TRUE(GrammarSession::accept_bytes(*draft, "b\"], []]"));
  EXPECT_TRUE(draft->is_complete());
  EXPECT_EQ(session().allowed(*constraint), before);
  const auto second = constraint->clone();
  ASSERT_TRUE(GrammarSession::accept_bytes(*second, "b\"],[\"ab\"]]"));
}

// Frames that nothing returns to are dropped on the way; deep and long texts go on.
TEST(GrammarMatcher, LongAndDeepTexts) {
  const auto any = compile_json_schema("true").value_or_throw();
  const std::size_t depth = 3000;
  EXPECT_TRUE(session().matches(
      *any, fmt::format("{}1{}", std::string(depth, '['), std::string(depth, ']'))));
  const auto counted =
      compile_json_schema(R"({"maxLength":5000,"minLength":3000})").value_or_throw();
  EXPECT_TRUE(session().matches(*counted, fmt::format("\"{}\"", std::string(5000, 'x'))));
  EXPECT_FALSE(session().matches(*counted, fmt::format("\"{}\"", std::string(5001, 'x'))));
  EXPECT_FALSE(session().matches(*counted, fmt::format("\"{}\"", std::string(2999, 'x'))));
}

// Many readings stay open at once.
TEST(GrammarMatcher, ManyAlternatives) {
  std::string alternatives;
  for (int i = 0; i < 400; ++i) {
    alternatives += fmt::format(
        R"({}{{"properties":{{"kind":{{"const":{}}},"value":{{}}}},"required":["kind"]}})",
        i > 0 ? "," : "", i);
  }
  const auto grammar =
      compile_json_schema(fmt::format(R"({{"anyOf":[{}]}})", alternatives)).value_or_throw();
  EXPECT_TRUE(session().matches(*grammar, R"({"kind": 399, "value": [799]})"));
  EXPECT_FALSE(session().matches(*grammar, R"({"kind": 400})"));
  const auto constraint = session().start(*grammar);
  ASSERT_TRUE(GrammarSession::accept_bytes(*constraint, R"({"kind":)"));
  EXPECT_EQ(session().allowed(*constraint), session().allowed_by_trying(*constraint));
}

TEST(GrammarMatcher, WhiteSpaceIsBounded) {
  const auto any = compile_json_object().value_or_throw();
  EXPECT_TRUE(session().matches(*any, fmt::format("{{\n{:32}\"a\": 1}}", "")));
  EXPECT_FALSE(session().matches(*any, fmt::format("{{\n{:33}\"a\": 1}}", "")));
  EXPECT_FALSE(session().matches(*any, "{  \"a\": 1}"));
  EXPECT_FALSE(session().matches(*any, "{\n\n\"a\": 1}"));
  EXPECT_FALSE(session().matches(*any, " {}"));
}

TEST(GrammarMatcher, AMaskMayBeWiderOrNarrowerThanTheVocabulary) {
  const auto grammar = compile_regex("[\\s\\S]*").value_or_throw();
  const auto constraint = session().start(*grammar);
  std::vector<std::uint32_t> narrow(2, 7);
  constraint->fill_mask(narrow);
  EXPECT_NE(narrow[0], 0U);
  std::vector<std::uint32_t> wide(1000, 7);
  constraint->fill_mask(wide);
  EXPECT_EQ(wide.back(), 0U);
}

}  // namespace
}  // namespace tandem
