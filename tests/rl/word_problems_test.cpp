#include "rl/word_problems.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/checked_cast.h"
#include "rl/reward.h"
#include "support/temp_path.h"

namespace tandem {
namespace {

double reward(const std::string& answer, std::int64_t gold) {
  return grade(RewardType::kArithmetic, answer, {gold, 1}, true).reward;
}

/// Longest match; -1 when a character is unknown.
std::int64_t count_tokens(const std::set<std::string>& vocabulary, std::string_view text) {
  std::size_t longest = 0;
  for (const std::string& token : vocabulary) {
    longest = std::max(longest, token.size());
  }
  std::int64_t count = 0;
  while (!text.empty()) {
    std::size_t size = std::min(longest, text.size());
    while (size > 0 && vocabulary.count(std::string(text.substr(0, size))) == 0) {
      --size;
    }
    if (size == 0) {
      return -1;
    }
    text.remove_prefix(size);
    ++count;
  }
  return count;
}

TEST(WordProblems, AnswersAreRightStepByStep) {
  std::int64_t num_hasty_right = 0;
  constexpr std::int64_t kCount = 4000;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const WordProblem p = make_word_problem(1, i);
    std::array<int, 8> n{};
    std::array<char, 2> op{};
    // "7+3=10\n10-4=6\n#### 6"
    ASSERT_EQ(std::sscanf(p.careful_answer.c_str(), "%d%c%d=%d\n%d%c%d=%d", &n[0], &op[0], &n[1],
                          &n[2], &n[3], &op[1], &n[4], &n[5]),
              8)
        << p.careful_answer;
    EXPECT_EQ(n[2], op[0] == '+' ? n[0] + n[1] : n[0] - n[1]);
    EXPECT_EQ(n[3], n[2]);
    EXPECT_EQ(n[5], op[1] == '+' ? n[3] + n[4] : n[3] - n[4]);
    EXPECT_EQ(n[5], p.gold);
    EXPECT_EQ((std::array<std::int64_t, 3>{n[0], n[1], n[4]}), p.numbers);
    for (const int number : {n[0], n[1], n[4]}) {
      EXPECT_TRUE(number >= 1 && number <= 9) << p.careful_answer;
    }
    EXPECT_TRUE(n[2] >= 0 && n[5] >= 0 && n[5] <= 27) << p.careful_answer;
    EXPECT_EQ(reward(p.careful_answer, p.gold), 1.0);

    ASSERT_TRUE(p.hasty_answer.starts_with("#### "));
    const std::int64_t guess = std::stoll(p.hasty_answer.substr(5));
    EXPECT_TRUE(guess >= 0 && guess <= 27 && std::abs(guess - p.gold) <= 9) << p.hasty_answer;
    num_hasty_right += guess == p.gold ? 1 : 0;
  }
  // Binomial(4000, 0.1) has standard deviation 19; five of them around 400.
  EXPECT_NEAR(static_cast<double>(num_hasty_right), 400, 95);
}

TEST(WordProblems, TextsAreShortVariedAndWellFormed) {
  std::set<std::string> questions;
  for (std::uint64_t i = 0; i < 3000; ++i) {
    const std::string question = make_word_problem(2, i).question;
    questions.insert(question);
    EXPECT_EQ(question.find_first_of("{}"), std::string::npos) << question;
    EXPECT_EQ(question.find("  "), std::string::npos) << question;
    EXPECT_EQ(question.back(), '?') << question;
    EXPECT_LE(question.size(), 110U) << question;
    EXPECT_EQ(question.find(" 1 pens"), std::string::npos) << question;
    EXPECT_EQ(question.find("Then He"), std::string::npos) << question;
    EXPECT_EQ(question.find("Last She"), std::string::npos) << question;
  }
  EXPECT_GT(questions.size(), 2900U);
}

TEST(WordProblems, SameIndexSameProblem) {
  EXPECT_EQ(make_word_problem(3, 17).question, make_word_problem(3, 17).question);
  EXPECT_NE(make_word_problem(3, 17).question, make_word_problem(3, 18).question);
  EXPECT_NE(make_word_problem(4, 17).question, make_word_problem(3, 17).question);
}

TEST(WordProblems, NoHeldOutTextOrTripleIsEverTrained) {
  const auto test = held_out_problems(1, 1000);
  std::set<std::string> test_texts;
  std::set<std::array<std::int64_t, 3>> held_out_triples;
  std::int64_t num_by_text = 0;
  for (const WordProblem& p : test) {
    test_texts.insert(p.question);
    if (held_out(p) == HeldOut::kTriple) {
      held_out_triples.insert(p.numbers);
    } else {
      ++num_by_text;
    }
  }
  EXPECT_EQ(test_texts.size(), 1000U);  // all different
  EXPECT_GT(num_by_text, 300);          // both kinds of held-out problems are in the test
  EXPECT_LT(num_by_text, 700);
  EXPECT_GT(held_out_triples.size(), 40U);

  const auto check = [&](const WordProblem& p) {
    EXPECT_EQ(test_texts.count(p.question), 0U) << p.question;
    EXPECT_EQ(held_out_triples.count(p.numbers), 0U) << p.question;
  };
  for (const WordProblem& p : training_problems(1, 8000)) {
    check(p);
  }
  for (const Demonstration& d : make_demonstrations({.seed = 1, .num_batches = 125})) {
    check(d.problem);
  }
}

TEST(WordProblems, EachBatchHasTheExactShareOfCarefulAnswersInShuffledPlaces) {
  const std::array<std::pair<double, int>, 4> expected = {
      {{0.45, 29}, {0.46, 29}, {0.0, 0}, {1.0, 64}}};
  for (const auto& [share, num_careful] : expected) {
    const auto demos = make_demonstrations({.seed = 9, .num_batches = 20, .careful_share = share});
    ASSERT_EQ(demos.size(), 20U * 64U);
    std::set<std::vector<bool>> orders;
    for (std::size_t batch = 0; batch < 20; ++batch) {
      std::vector<bool> order;
      for (std::size_t i = 0; i < 64; ++i) {
        const Demonstration& demo = demos[64 * batch + i];
        order.push_back(demo.is_careful);
        EXPECT_EQ(demo.answer().find('=') != std::string::npos, demo.is_careful);
      }
      EXPECT_EQ(std::count(order.begin(), order.end(), true), num_careful);
      orders.insert(order);
    }
    EXPECT_EQ(orders.size(), num_careful == 0 || num_careful == 64 ? 1U : 20U);
  }
}

TEST(WordProblems, VocabularyCoversEveryTextInFewTokens) {
  const auto list = word_problem_vocabulary();
  const std::set<std::string> vocabulary(list.begin(), list.end());
  EXPECT_EQ(vocabulary.size(), list.size());
  EXPECT_LT(list.size(), 256U);
  for (int n = 0; n <= 27; ++n) {
    EXPECT_EQ(vocabulary.count(std::to_string(n)), 1U);
    EXPECT_EQ(vocabulary.count(fmt::format(" {}", n)), 1U);
  }
  for (const std::string& token : list) {
    for (const char c : token) {
      EXPECT_EQ(vocabulary.count(std::string(1, c)), 1U) << token;
    }
  }
  std::int64_t total = 0;
  constexpr std::int64_t kCount = 2000;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const WordProblem p = make_word_problem(5, i);
    const std::int64_t question = count_tokens(vocabulary, p.question + "\n");
    const std::int64_t careful = count_tokens(vocabulary, p.careful_answer) + 1;  // + <eos>
    const std::int64_t hasty = count_tokens(vocabulary, p.hasty_answer) + 1;
    ASSERT_GT(question, 0) << p.question;
    EXPECT_EQ(careful, 15) << p.careful_answer;
    EXPECT_EQ(hasty, 3) << p.hasty_answer;
    EXPECT_LE(question + careful, 40) << p.question;
    total += question + careful;
  }
  const double mean = static_cast<double>(total) / kCount;
  EXPECT_GT(mean, 30) << mean;
  EXPECT_LT(mean, 38) << mean;
}

TEST(WordProblems, TokenizerFileNamesItsParts) {
  const auto file = nlohmann::json::parse(word_problem_tokenizer_json());
  EXPECT_EQ(file["type"], "char");
  EXPECT_EQ(file["tokens"].get<std::vector<std::string>>(), word_problem_vocabulary());
  EXPECT_EQ(file["special"], (std::vector<std::string>{"<eos>", "<unk>"}));
  EXPECT_EQ(file["stop"], (std::vector<std::string>{"<eos>"}));
}

TEST(WordProblems, FilesHaveGsm8ksForm) {
  const std::string dir = temp_path("data");
  write_demo_data(dir, {.seed = 1,
                        .num_train = 300,
                        .num_test = 100,
                        .demonstrations = {.num_batches = 3, .careful_share = 0.46}});
  const auto read = [&](const std::string& name) {
    std::vector<nlohmann::json> lines;
    std::ifstream in(dir + "/" + name);
    for (std::string line; std::getline(in, line);) {
      lines.push_back(nlohmann::json::parse(line));
    }
    return lines;
  };
  EXPECT_EQ(read("train.jsonl").size(), 300U);
  EXPECT_EQ(read("test.jsonl").size(), 100U);
  const auto sft = read("sft.jsonl");
  EXPECT_EQ(sft.size(), 192U);
  for (const auto& line : sft) {
    EXPECT_EQ(line.size(), 2U);
    EXPECT_TRUE(line["question"].is_string());
    EXPECT_TRUE(parse_gold(line["answer"].get<std::string>()).ok());
  }
  EXPECT_TRUE(std::filesystem::exists(dir + "/tokenizer.json"));
}

}  // namespace
}  // namespace tandem
