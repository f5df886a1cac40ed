// tandem bench on the CPU, with made-up weights of a tiny model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/cli_support.h"

namespace tandem {
namespace {

using test::Outcome;
using test::run_tandem;

/// The rows of `tandem bench NAME k3-tiny --json ARGS`.
std::vector<nlohmann::json> bench(const std::string& name, std::vector<std::string> args) {
  std::vector<std::string> words{"bench",     name,   "k3-tiny", "--load-format", "dummy",
                                 "--experts", "bf16", "--json",  "--threads",     "1"};
  words.insert(words.end(), args.begin(), args.end());
  const Outcome outcome = run_tandem(words);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  std::vector<nlohmann::json> rows;
  std::istringstream lines(outcome.out);
  for (std::string line; std::getline(lines, line);) {
    rows.push_back(nlohmann::json::parse(line));
  }
  return rows;
}

TEST(Bench, DecodeMeasuresEveryBatchAndContext) {
  const auto rows = bench("decode", {"--batch", "1,3", "--context", "5,70"});
  ASSERT_EQ(rows.size(), 4U);
  EXPECT_EQ(rows[3]["batch"], 3);
  EXPECT_EQ(rows[3]["context"], 70);
  EXPECT_GT(rows[3]["step_us"], 0.0);
  EXPECT_GT(rows[3]["times_roof"], 0.0);
}

TEST(Bench, KernelsSplitAPassIntoItsOps) {
  for (const char* new_tokens : {"1", "40"}) {
    const auto rows = bench("kernels", {"--batch", "2", "--context", "9", "--prefill", new_tokens});
    ASSERT_EQ(rows.size(), 1U);
    double sum = 0;
    for (const auto& part : rows[0]["parts"]) {
      sum += part["us"].get<double>();
      EXPECT_GT(part["bytes"], 0.0) << part["name"];
    }
    EXPECT_NEAR(sum, rows[0]["us"].get<double>(), 1e-3);
    EXPECT_GT(rows[0]["calls"].size(), 20U);
  }
}

TEST(Bench, PrefillInPiecesLeavesTheBitsOfOnePiece) {
  const auto rows = bench("prefill", {"--prefill", "200,64", "--check-pieces", "64"});
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0]["prompt"], 200);
  EXPECT_EQ(rows[0]["equal"], true);
  const auto timed = bench("prefill", {"--prefill", "100", "--pieces", "30", "--rounds", "1"});
  EXPECT_EQ(timed.at(0)["piece"], 30);
  EXPECT_EQ(run_tandem({"bench", "prefill", "x", "--check-pieces", "65"}).exit_code, 2);
  EXPECT_EQ(
      run_tandem({"bench", "prefill", "x", "--check-pieces", "64", "--pieces", "64"}).exit_code, 2);
}

TEST(Bench, EngineReportsPromptsAndDecodeSteps) {
  const auto rows = bench("engine", {"--prefill", "30", "--batch", "1,4", "--prompt", "7",
                                     "--tokens", "5", "--rounds", "1"});
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0]["prefill"], 30);
  EXPECT_EQ(rows[2]["decode_batch"], 4);
  EXPECT_EQ(rows[2]["steps"], 10);  // two rounds of five
  EXPECT_GT(rows[2]["tokens_per_s"], 0.0);
}

}  // namespace
}  // namespace tandem
