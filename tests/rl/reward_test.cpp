#include "rl/reward.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace tandem {
namespace {

namespace fs = std::filesystem;

Rational gold(const std::string& text) {
  return parse_gold(text).value_or_throw();
}

RewardStatus status(const std::string& response, const std::string& label, bool finished = true) {
  const RewardResult result = grade(RewardType::kGsm8k, response, gold(label), finished);
  EXPECT_EQ(result.reward, result.status == RewardStatus::kCorrect ? 1.0 : 0.0);
  return result.status;
}

struct Case {
  std::string response;
  std::string label;
  RewardStatus expected;
};

void expect_all(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    EXPECT_EQ(to_string(status(c.response, c.label)), to_string(c.expected))
        << "response '" << c.response << "', gold " << c.label;
  }
}

TEST(Reward, AcceptsEveryFormOfTheRightNumber) {
  constexpr auto kRight = RewardStatus::kCorrect;
  expect_all({{"#### 18", "18", kRight},
              {"####18", "18", kRight},
              {"#### $18.00", "18", kRight},
              {"#### 18.", "18", kRight},
              {"#### 18.000000000000000000000000000000000000000000000000000", "18", kRight},
              {"  \t#### 18  \r", "18", kRight},
              {"#### +18", "18", kRight},
              {"#### -3", "-3", kRight},
              {"#### \u22123", "-3", kRight},
              {"#### -$3", "-3", kRight},
              {"#### $-3", "-3", kRight},
              {"#### \u00a318", "18", kRight},
              {"#### \u20ac18", "18", kRight},
              {"#### $18$", "18", kRight},
              {"#### \\(18\\)", "18", kRight},
              {"#### 50%", "50", kRight},
              {"#### 50\\%", "50", kRight},
              {"#### 1,234", "1234", kRight},
              {"#### 1234", "1,234", kRight},
              {"#### 1,234,567.50", "1234567.5", kRight},
              {"#### 1\\,234", "1234", kRight},
              {"#### 1,\\!234", "1234", kRight},
              {"#### 1/2", "0.5", kRight},
              {"#### 2/4", "1/2", kRight},
              {"#### .5", "1/2", kRight},
              {"#### \\frac{1}{2}", "0.5", kRight},
              {"#### -\\dfrac{1}{2}", "-0.5", kRight},
              {"#### \\frac{-1}{2}", "-0.5", kRight},
              {"#### 007", "7", kRight},
              {"#### -0", "0", kRight},
              {"so \\boxed{18}", "18", kRight},
              {"\\boxed{\\frac{1}{2}}", "1/2", kRight},
              {"\\boxed{17} no, \\boxed{18}.", "18", kRight},
              {"\\boxed{18} and \\boxed{unclosed", "18", kRight},
              {"#### 18\n#### 19", "19", kRight},
              {"#### 17\nmore text\n#### 18\ntrailing text", "18", kRight},
              {"\\boxed{17}\n#### 18", "18", kRight},
              {"a\u2028#### 17\n#### 18", "18", kRight}});
}

TEST(Reward, NearMissesGetNothing) {
  constexpr auto kBad = RewardStatus::kMalformed;
  constexpr auto kWrong = RewardStatus::kWrong;
  constexpr auto kNone = RewardStatus::kNoAnswer;
  expect_all({{"#### 1,23", "123", kBad},
              {"#### 1\\,23", "123", kBad},
              {"#### 1234,567", "1234567", kBad},
              {"#### 1,2345", "12345", kBad},
              {"#### 1,23,456", "123456", kBad},
              {"#### 1,2345,678", "12345678", kBad},
              {"#### ,123", "123", kBad},
              {"#### 123,", "123", kBad},
              {"#### 5,", "5", kBad},
              {"#### ,", "5", kBad},
              {"#### 18 apples", "18", kBad},
              {"#### 18apples", "18", kBad},
              {"#### apples 18", "18", kBad},
              {"#### is 18", "18", kBad},
              {"#### 18 19", "18", kBad},
              {"#### 18 #### 18", "18", kBad},
              {"##### 18", "18", kBad},
              {"#### --18", "18", kBad},
              {"#### --18", "-18", kBad},
              {"#### -$-18", "-18", kBad},
              {"#### - 18", "-18", kBad},
              {"#### \u2078", "8", kBad},
              {"#### \uff11\uff18", "18", kBad},
              {"#### 1e1", "10", kBad},
              {"#### 10^1", "10", kBad},
              {"#### 9+9", "18", kBad},
              {"#### 2*9", "18", kBad},
              {"#### 18..", "18", kBad},
              {"#### 1.8.0", "1.8", kBad},
              {"#### 18.0.", "18.1", kWrong},
              {"#### 1.234,567", "1234567", kBad},
              {"#### $$18$$", "18", kBad},
              {"#### 1/0", "1", kBad},
              {"#### 1/00", "1", kBad},
              {"#### 1/2/1", "1/2", kBad},
              {"#### 1.0/2", "1/2", kBad},
              {"#### \\frac{1}{2", "1/2", kBad},
              {"#### \\frac{1}{0}", "1", kBad},
              {"#### \\frac{1/1}{2}", "1/2", kBad},
              {"#### -\\frac{-1}{2}", "1/2", kBad},
              {"#### \\frac12", "1/2", kBad},
              {"#### inf", "18", kBad},
              {"#### nan", "18", kBad},
              {"#### 0x12", "18", kBad},
              {"####", "18", kBad},
              {"#### ", "18", kBad},
              {"#### .", "18", kBad},
              {"#### $", "18", kBad},
              {"#### %", "18", kBad},
              {"#### -", "18", kBad},
              {"", "18", kNone},
              {"18", "18", kNone},
              {"the answer is 18", "18", kNone},
              {"### 18", "18", kNone},
              {"x #### 18", "18", kNone},
              {"\\boxed{18", "18", kNone},
              {"\\boxed 18", "18", kNone},
              {"\\boxed{}", "18", kBad},
              {"\\boxed{18 \\text{ apples}}", "18", kBad},
              {"#### 19", "18", kWrong},
              {"#### 3", "-3", kWrong},
              {"#### -3", "3", kWrong},
              {"#### 18.0000001", "18", kWrong},
              {"#### 18\n#### 19", "18", kWrong},
              {"#### 18\n#### 19 apples", "18", kBad},
              {"\\boxed{18}\n#### 19", "18", kWrong},
              {"#### 0.333333333333333333333333333333", "1/3", kWrong},
              {"#### 10000000000000000000000000000000000000000", "1", kWrong},
              {"#### 10\u2074\u2070", "1", kBad}});
}

TEST(Reward, AnAnswerCountsOnlyWhenComplete) {
  EXPECT_EQ(status("#### 18", "18", false), RewardStatus::kTruncated);
  EXPECT_EQ(status("#### 1", "18", false), RewardStatus::kTruncated);
  EXPECT_EQ(status("#### 18\n", "18", false), RewardStatus::kCorrect);
  EXPECT_EQ(status("#### 18\nand then", "18", false), RewardStatus::kCorrect);
  EXPECT_EQ(status("#### 18\n#### 1", "18", false), RewardStatus::kTruncated);
  EXPECT_EQ(status("#### 17\nand then", "18", false), RewardStatus::kWrong);
  EXPECT_EQ(status("\\boxed{18}", "18", false), RewardStatus::kTruncated);
  EXPECT_EQ(status("\\boxed{18}\n", "18", false), RewardStatus::kCorrect);
  EXPECT_EQ(status("thinking", "18", false), RewardStatus::kTruncated);
  EXPECT_EQ(status("", "18", false), RewardStatus::kTruncated);
}

TEST(Reward, OverflowIsEqualToNothing) {
  const std::string huge(60, '9');
  EXPECT_EQ(parse_answer_number(huge).status, NumberStatus::kOverflow);
  EXPECT_FALSE(parse_gold("#### " + huge).ok());
  EXPECT_EQ(parse_answer_number("0." + std::string(60, '3')).status, NumberStatus::kOverflow);
  // The largest 127-bit integer still fits, the next does not.
  EXPECT_EQ(parse_answer_number("170141183460469231731687303715884105727").status,
            NumberStatus::kOk);
  EXPECT_EQ(parse_answer_number("170141183460469231731687303715884105728").status,
            NumberStatus::kOverflow);
}

TEST(Reward, ArithmeticWantsTheAnswerLine) {
  const Rational eighteen = gold("18");
  EXPECT_EQ(grade(RewardType::kArithmetic, "9+9=18\n#### 18", eighteen, true).reward, 1.0);
  EXPECT_EQ(grade(RewardType::kArithmetic, "\\boxed{18}", eighteen, true).status,
            RewardStatus::kNoAnswer);
}

TEST(Reward, FlexibleIsAMetricOnly) {
  const Rational eighteen = gold("18");
  EXPECT_TRUE(flexible_match("it is 18.", eighteen));
  EXPECT_TRUE(flexible_match("17 or 1,8 or (18)", eighteen));
  EXPECT_TRUE(flexible_match("it is -3", gold("-3")));
  EXPECT_FALSE(flexible_match("18 or 19", eighteen));
  EXPECT_FALSE(flexible_match("none", eighteen));
  EXPECT_FALSE(flexible_match("", eighteen));
  EXPECT_TRUE(parse_reward_type("gsm8k").ok());
  EXPECT_TRUE(parse_reward_type("arithmetic").ok());
  EXPECT_FALSE(parse_reward_type("flexible").ok());
  EXPECT_NE(parse_reward_type("math").message().find("'math'"), std::string::npos);
}

TEST(Reward, IsTotalOnHostileText) {
  std::string nested;
  for (int i = 0; i < 20000; ++i) {
    nested += "\\boxed{";
  }
  EXPECT_EQ(status(nested, "18"), RewardStatus::kNoAnswer);
  std::string bytes;
  for (int i = 0; i < 256; ++i) {
    bytes += static_cast<char>(i);
  }
  EXPECT_EQ(status("####" + bytes, "18"), RewardStatus::kMalformed);
  EXPECT_EQ(status(std::string("#### 18\0", 8), "18"), RewardStatus::kMalformed);
  EXPECT_EQ(status(std::string(100000, '#'), "18"), RewardStatus::kMalformed);
}

/// The data set sits outside the repository; looked for in every parent folder.
std::optional<fs::path> gsm8k_folder() {
  for (fs::path dir = TDM_SOURCE_DIR; dir.has_relative_path(); dir = dir.parent_path()) {
    if (fs::exists(dir / "shared/data/gsm8k/train.jsonl")) {
      return dir / "shared/data/gsm8k";
    }
  }
  return std::nullopt;
}

TEST(Reward, AllPublishedGsm8kAnswersAreRight) {
  const auto folder = gsm8k_folder();
  if (!folder) {
    GTEST_SKIP() << "shared/data/gsm8k is not beside this checkout";
  }
  int num_answers = 0;
  for (const char* file : {"train.jsonl", "test.jsonl"}) {
    std::ifstream in(*folder / file, std::ios::binary);
    for (std::string line; std::getline(in, line);) {
      const auto answer = nlohmann::json::parse(line)["answer"].get<std::string>();
      const auto parsed = parse_gold(answer);
      ASSERT_TRUE(parsed.ok()) << parsed.message();
      EXPECT_EQ(grade(RewardType::kGsm8k, answer, *parsed, true).reward, 1.0) << answer;
      EXPECT_EQ(grade(RewardType::kGsm8k, answer, *parsed, false).reward, 0.0) << answer;
      EXPECT_EQ(grade(RewardType::kGsm8k, answer + "\n", *parsed, false).reward, 1.0) << answer;
      // Near misses made from each answer: one digit more, a unit, the other sign, one off.
      EXPECT_EQ(grade(RewardType::kGsm8k, answer + "1", *parsed, true).reward, 0.0) << answer;
      EXPECT_EQ(grade(RewardType::kGsm8k, answer + " units", *parsed, true).reward, 0.0) << answer;
      Rational negated = *parsed;
      negated.numerator = -negated.numerator;
      EXPECT_EQ(grade(RewardType::kGsm8k, answer, negated, true).reward,
                parsed->numerator == 0 ? 1.0 : 0.0);
      Rational off_by_one = *parsed;
      off_by_one.numerator += off_by_one.denominator;
      EXPECT_EQ(grade(RewardType::kGsm8k, answer, off_by_one, true).reward, 0.0);
      ++num_answers;
    }
  }
  EXPECT_EQ(num_answers, 8792);
}

}  // namespace
}  // namespace tandem
