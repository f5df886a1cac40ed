#include "rl/run_store.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/checked_cast.h"
#include "support/temp_path.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

SampleRecord sample(std::int64_t group, std::int64_t index, std::size_t length) {
  SampleRecord s;
  s.group_index = group;
  s.sample_index = index;
  s.prompt = "How many?";
  s.response = std::string("7+3=10\n\0\xFF", 9) + std::to_string(index);
  s.label = "10";
  for (std::size_t t = 0; t < length; ++t) {
    s.tokens.push_back(checked_cast<std::int32_t>(t));
    s.logprobs.push_back(-0.125F * static_cast<float>(t));
    s.loss_mask.push_back(t % 3 == 0 ? 0 : 1);
  }
  s.tokens.push_back(99);  // one prompt token more than response tokens
  s.reward = 1.0;
  s.status = "completed";
  s.grade = "correct";
  s.weight_version = 4;
  return s;
}

StepRecord step_record(std::int64_t step, std::int64_t num_samples = 2, std::size_t length = 5) {
  StepRecord record{step, fmt::format(R"({{"step":{},"reward_mean":0.5}})", step), {}, {}};
  for (std::int64_t i = 0; i < num_samples; ++i) {
    record.samples.push_back(sample(i / 2, i % 2, length));
  }
  record.evals = {{"greedy", 0.75, 100}, {"sampled", 0.5, 100}};
  return record;
}

RunStore make_store(const std::string& dir) {
  return RunStore::create(dir, {"demo", "[run]\nname = \"demo\"\n", R"({"seed":1})", "{}"})
      .value_or_throw();
}

TEST(RunStore, GivesBackWhatWasWritten) {
  const std::string dir = temp_path("round_trip");
  {
    RunStore store = make_store(dir);
    EXPECT_EQ(store.last_step(), std::nullopt);
    StepRecord record = step_record(1);
    record.samples[1].reward.reset();
    record.samples[1].tokens = {1};
    record.samples[1].logprobs.clear();
    record.samples[1].loss_mask.clear();
    record.samples.push_back(sample(0, 0, 3));
    record.samples.back().split = "eval";
    store.commit_step(record);
  }
  const auto store = RunStore::open_read_only(dir);
  ASSERT_TRUE(store.ok()) << store.message();
  EXPECT_EQ(store->info().config, "[run]\nname = \"demo\"\n");
  EXPECT_EQ(store->info().seeds, R"({"seed":1})");
  EXPECT_EQ(store->last_step(), 1);
  EXPECT_EQ(store->metrics_lines(), (std::vector<std::string>{R"({"step":1,"reward_mean":0.5})"}));
  const auto samples = store->samples(1);
  ASSERT_EQ(samples.size(), 2U);
  const SampleRecord expected = sample(0, 0, 5);
  EXPECT_EQ(samples[0].response, expected.response);
  EXPECT_EQ(samples[0].tokens, expected.tokens);
  EXPECT_EQ(samples[0].logprobs, expected.logprobs);
  EXPECT_EQ(samples[0].loss_mask, expected.loss_mask);
  EXPECT_EQ(samples[0].reward, 1.0);
  EXPECT_EQ(samples[0].grade, "correct");
  EXPECT_EQ(samples[0].weight_version, 4);
  EXPECT_EQ(samples[1].reward, std::nullopt);
  EXPECT_TRUE(samples[1].logprobs.empty());
  EXPECT_EQ(store->samples(1, "eval").size(), 1U);
  EXPECT_EQ(store->samples(1, "train", 1).size(), 1U);
  EXPECT_EQ(store->sampled_steps("eval"), std::vector<std::int64_t>{1});
  const auto evals = store->evals();
  ASSERT_EQ(evals.size(), 2U);
  EXPECT_EQ(evals[0].eval.name, "greedy");
  EXPECT_EQ(evals[0].eval.accuracy, 0.75);
}

TEST(RunStore, TruncateForgetsLaterStepsEverywhere) {
  const std::string dir = temp_path("truncate");
  RunStore store = make_store(dir);
  for (std::int64_t step = 1; step <= 4; ++step) {
    store.commit_step(step_record(step));
  }
  store.truncate_after(2);
  EXPECT_EQ(store.last_step(), 2);
  EXPECT_TRUE(store.samples(3).empty());
  EXPECT_EQ(store.evals().size(), 4U);
  EXPECT_EQ(read_file(dir + "/metrics.jsonl"),
            "{\"step\":1,\"reward_mean\":0.5}\n{\"step\":2,\"reward_mean\":0.5}\n");
  store.commit_step(step_record(3));
  EXPECT_EQ(store.metrics_lines().size(), 3U);
}

TEST(RunStore, OpeningMakesTheMetricsFileMatchTheSteps) {
  const std::string dir = temp_path("repair");
  { make_store(dir).commit_step(step_record(1)); }
  const std::string good = read_file(dir + "/metrics.jsonl");
  for (const std::string& broken : {std::string(), good + "{\"step\":2", good + good}) {
    std::ofstream(dir + "/metrics.jsonl", std::ios::binary) << broken;
    ASSERT_TRUE(RunStore::open(dir).ok());
    EXPECT_EQ(read_file(dir + "/metrics.jsonl"), good);
  }
}

TEST(RunStore, RefusesWhatIsNotARun) {
  const std::string dir = temp_path("refuse");
  EXPECT_THAT(RunStore::open(dir).message(), HasSubstr("run.sqlite is missing"));
  fs::create_directories(dir);
  std::ofstream(dir + "/run.sqlite") << std::string(5000, 'x');
  EXPECT_THAT(RunStore::open(dir).message(), HasSubstr("not an SQLite database"));
  EXPECT_THAT(RunStore::create(dir, {}).message(), HasSubstr("already holds a run"));

  fs::remove(dir + "/run.sqlite");
  sqlite3* other = nullptr;
  ASSERT_EQ(sqlite3_open((dir + "/run.sqlite").c_str(), &other), SQLITE_OK);
  sqlite3_exec(other, "CREATE TABLE t (x)", nullptr, nullptr, nullptr);
  sqlite3_close(other);
  EXPECT_THAT(RunStore::open(dir).message(), HasSubstr("not a run store of tandem"));

  std::ofstream(dir + "/file") << "x";
  EXPECT_THAT(RunStore::create(dir + "/file/run", {}).message(), HasSubstr("cannot create"));
}

TEST(RunStore, ReportsDamage) {
  const std::string dir = temp_path("damage");
  { make_store(dir).commit_step(step_record(1, 40, 300)); }
  const auto size = fs::file_size(dir + "/run.sqlite");
  {
    // Overwrite the middle: the header stays valid.
    std::fstream file(dir + "/run.sqlite", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(8192);
    file << std::string(size - 8192, '\x5A');
  }
  EXPECT_THAT(RunStore::open(dir).message(), HasSubstr("damaged"));
}

TEST(RunStore, OneWriterManyReaders) {
  const std::string dir = temp_path("lock");
  RunStore writer = make_store(dir);
  writer.commit_step(step_record(1));
  EXPECT_THAT(RunStore::open(dir).message(), HasSubstr("another process is writing"));
  const auto reader = RunStore::open_read_only(dir);
  ASSERT_TRUE(reader.ok()) << reader.message();
  EXPECT_EQ(reader->last_step(), 1);
  writer.commit_step(step_record(2));
  EXPECT_EQ(reader->last_step(), 2);
}

constexpr std::int64_t kBigSamples = 64;
constexpr std::size_t kBigLength = 1500;  // about 1 MB a step: a kill has something to hit

void expect_whole(const std::string& dir, std::int64_t last_known) {
  const auto store = RunStore::open(dir);
  ASSERT_TRUE(store.ok()) << store.message();
  const std::int64_t last = store->last_step().value_or(0);
  EXPECT_GE(last, last_known);
  EXPECT_LE(last, last_known + 1);  // the one in flight may have made it
  std::string lines;
  for (std::int64_t step = 1; step <= last; ++step) {
    EXPECT_EQ(isize(store->samples(step)), kBigSamples) << step;
    lines += step_record(step).metrics_json + "\n";
  }
  ASSERT_GE(last, 1);
  ASSERT_FALSE(store->samples(last).empty());
  EXPECT_EQ(store->samples(last).back().tokens, sample(0, 0, kBigLength).tokens);
  EXPECT_TRUE(store->samples(last + 1).empty());
  EXPECT_EQ(read_file(dir + "/metrics.jsonl"), lines);
}

TEST(RunStore, SurvivesKillAtAnyMoment) {
  // From before the first write of a transaction to past its end, which takes tens of milliseconds.
  for (const int delay_ms : {0, 2, 6, 15, 30, 60}) {
    const std::string dir = temp_path("kill");
    std::array<int, 2> ends{};
    ASSERT_EQ(pipe(ends.data()), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      RunStore store = make_store(dir);
      // Built once, so that nearly all of the child's time is spent inside transactions.
      StepRecord record = step_record(1, kBigSamples, kBigLength);
      for (std::int64_t step = 1;; ++step) {
        record.step = step;
        record.metrics_json = step_record(step).metrics_json;
        store.commit_step(record);
        if (write(ends[1], &step, sizeof(step)) != isize(std::string(sizeof(step), ' '))) {
          _exit(1);
        }
      }
    }
    close(ends[1]);
    std::int64_t committed = 0;
    std::int64_t step = 0;
    while (committed < 2 && read(ends[0], &step, sizeof(step)) > 0) {
      committed = step;
    }
    usleep(
        static_cast<useconds_t>(1000 * delay_ms));  // where it lands does not matter to the check
    ASSERT_EQ(kill(child, SIGKILL), 0);
    waitpid(child, nullptr, 0);
    while (read(ends[0], &step, sizeof(step)) > 0) {
      committed = step;
    }
    close(ends[0]);
    expect_whole(dir, committed);
  }
}

/// Commits step 1, then tries step 2 with no more room than half of it; returns the child's wait
/// status.
template <typename Body>
int run_with_full_disk(const std::string& dir, Body second_step) {
  const pid_t child = fork();
  if (child == 0) {
    RunStore store = make_store(dir);
    store.commit_step(step_record(1, kBigSamples, kBigLength));
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    rlimit limit{};
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = fs::file_size(dir + "/run.sqlite") + 400'000;
    setrlimit(RLIMIT_FSIZE, &limit);
    _exit(second_step(store, limit));
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST(RunStore, DyingInTheMiddleOfAWriteLosesOnlyThatStep) {
  const std::string dir = temp_path("die");
  const int status = run_with_full_disk(dir, [](RunStore& store, rlimit) {
    signal(SIGXFSZ, SIG_DFL);  // the kernel kills the process inside the write that goes too far
    store.commit_step(step_record(2, kBigSamples, kBigLength));
    return 0;
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGXFSZ);
  expect_whole(dir, 1);
  EXPECT_EQ(RunStore::open(dir)->last_step(), 1);
}

TEST(RunStore, FullDiskIsAnErrorAndTheRunGoesOnWhenThereIsRoom) {
  const std::string dir = temp_path("full");
  const int status = run_with_full_disk(dir, [](RunStore& store, rlimit limit) {
    signal(SIGXFSZ, SIG_IGN);
    try {
      store.commit_step(step_record(2, kBigSamples, kBigLength));
      return 1;
    } catch (const Error& error) {
      if (std::string(error.what()).find("run.sqlite") == std::string::npos) {
        return 2;
      }
    }
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_FSIZE, &limit);
    store.commit_step(step_record(2, kBigSamples, kBigLength));
    return 0;
  });
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  expect_whole(dir, 2);
}

}  // namespace
}  // namespace tandem
