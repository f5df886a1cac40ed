#include "rl/metrics.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "io/lines.h"
#include "support/temp_path.h"

namespace tandem {
namespace {

TEST(MetricSet, MergesSumsWithCountsNotMeans) {
  MetricSet a;
  MetricSet b;
  a.add_mean("m", 10.0, 1.0);
  b.add_mean("m", 2.0, 3.0);
  a.add_min("low", 4);
  b.add_min("low", 3);
  a.add_max("high", 4);
  b.add_max("high", 3);
  a.add_sum("sum", 1);
  b.add_sum("sum", 2);
  b.add_sum("only_b", 5);
  a.merge(b);
  EXPECT_EQ(a.value("m"), 3.0);  // the mean of means would be 5.33
  EXPECT_EQ(a.value("low"), 3.0);
  EXPECT_EQ(a.value("high"), 4.0);
  EXPECT_EQ(a.value("sum"), 3.0);
  EXPECT_EQ(a.value("only_b"), 5.0);
  EXPECT_EQ(a.value("absent"), std::nullopt);
  a.add_mean("no_tokens", 0.0, 0.0);
  EXPECT_EQ(a.value("no_tokens"), std::nullopt);
}

TEST(StepMetrics, LineHasEveryNamedFieldAndNullWhereNotMeasured) {
  StepMetrics metrics;
  metrics.step = 3;
  metrics.reward_mean = 0.1;
  metrics.grad_norm = std::numeric_limits<double>::quiet_NaN();
  metrics.extra["train/pg_clipfrac"] = 0.25;
  const auto line = nlohmann::json::parse(to_json_line(metrics));
  const std::set<std::string> required = {
      "step",           "reward_mean",          "eval_accuracy",      "logprob_mismatch_max",
      "entropy",        "train_rollout_kl",     "grad_norm",          "lr",
      "time_rollout_s", "response_tokens_mean", "truncated_fraction", "rollout_tokens_per_s",
      "time_train_s",   "time_total_s",         "train_tokens_per_s"};
  for (const std::string& name : required) {
    EXPECT_TRUE(line.contains(name)) << name;
  }
  EXPECT_EQ(line["step"], 3);
  EXPECT_EQ(line["reward_mean"], 0.1);
  EXPECT_TRUE(line["eval_accuracy"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
  EXPECT_EQ(line["train/pg_clipfrac"], 0.25);
}

TEST(StepMetrics, LineReadsBackToTheSameBits) {
  StepMetrics metrics;
  metrics.step = 7;
  metrics.reward_mean = 1.0 / 3;
  metrics.lr = 1e-300;
  metrics.extra["train/loss"] = -0.1 - 1e-17;
  metrics.extra["train/kl_loss"] = std::nullopt;
  const std::string line = to_json_line(metrics);
  const auto back = parse_json_line(line);
  ASSERT_TRUE(back.ok()) << back.message();
  EXPECT_EQ(back->reward_mean, metrics.reward_mean);
  EXPECT_EQ(back->lr, metrics.lr);
  EXPECT_EQ(back->extra, metrics.extra);
  EXPECT_EQ(to_json_line(*back), line);
}

TEST(StepMetrics, BadLinesAreRefused) {
  for (const char* line : {"", "{", "[]", "{}", R"({"step":1.5})", R"({"step":1,"lr":"x"})"}) {
    EXPECT_FALSE(parse_json_line(line).ok()) << line;
  }
}

TEST(RolloutMetrics, CountsGroupsAndLeavesRemovedSamplesOut) {
  const std::vector<SampleOutcome> samples = {
      {.group_id = 0, .reward = 1, .response_tokens = 4},
      {.group_id = 0, .reward = 1, .response_tokens = 6},
      {.group_id = 1, .reward = 0, .response_tokens = 10, .is_truncated = true},
      {.group_id = 1, .reward = 0, .response_tokens = 8},
      {.group_id = 2, .reward = 1, .response_tokens = 2},
      {.group_id = 2, .reward = 0, .response_tokens = 6},
      {.group_id = 2, .reward = 99, .response_tokens = 999, .is_removed = true}};
  const MetricMap m = rollout_metrics(samples);
  EXPECT_EQ(m.at("rollout/raw_reward"), 0.5);
  EXPECT_EQ(m.at("rollout/response_len/mean"), 6.0);
  EXPECT_EQ(m.at("rollout/response_len/median"), 6.0);
  EXPECT_EQ(m.at("rollout/response_len/min"), 2.0);
  EXPECT_EQ(m.at("rollout/response_len/max"), 10.0);
  EXPECT_EQ(m.at("rollout/truncated_ratio"), 1.0 / 6);
  EXPECT_EQ(m.at("rollout/removed_ratio"), 1.0 / 7);
  EXPECT_EQ(m.at("rollout/zero_std/all_zero_percentage"), 1.0 / 3);
  EXPECT_EQ(m.at("rollout/zero_std/all_one_percentage"), 1.0 / 3);
  EXPECT_EQ(m.at("passrate/pass@1"), 0.5);
  EXPECT_NEAR(*m.at("passrate/pass@2"), 2.0 / 3, 1e-15);
}

TEST(TrainMetrics, WhatWasNotMeasuredIsNull) {
  PolicyLossStats stats;
  stats.num_tokens = 4;
  stats.num_clipped = 1;
  const MetricMap m = train_metrics(stats, {});
  EXPECT_EQ(m.at("train/pg_clipfrac"), 0.25);
  EXPECT_EQ(m.at("train/train_rollout_kl"), std::nullopt);
  EXPECT_EQ(m.at("train/tis"), std::nullopt);
  EXPECT_EQ(m.at("train/ref_kl"), std::nullopt);
  StepMetrics metrics;
  set_loss_metrics(metrics, stats, {});
  EXPECT_EQ(metrics.logprob_mismatch_max, std::nullopt);
  stats.num_mismatch_tokens = 4;
  set_loss_metrics(metrics, stats, {});
  EXPECT_EQ(metrics.logprob_mismatch_max, 0.0);
  EXPECT_EQ(metrics.train_rollout_kl, 0.0);
}

TEST(Lines, FullDiskIsAnError) {
  if (!std::filesystem::exists("/dev/full")) {
    GTEST_SKIP() << "no /dev/full here";
  }
  try {
    append_line("/dev/full", "x");
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/dev/full: cannot write: No space"),
              std::string::npos)
        << error.what();
  }
}

TEST(Lines, RewriteMakesTheFileExact) {
  const std::string path = temp_path("lines.jsonl");
  append_line(path, "a");
  append_line(path, "b");
  rewrite_lines(path, std::vector<std::string>{"a"});
  std::ifstream file(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "a\n");
}

}  // namespace
}  // namespace tandem
