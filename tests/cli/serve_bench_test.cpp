// tandem bench serve as a command: its help, and what it refuses. Loads are tested in
// tests/server/load.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/cli_support.h"

namespace tandem {
namespace {

using test::Outcome;
using test::run_tandem;
using ::testing::HasSubstr;

Outcome bench_serve(std::vector<std::string> args) {
  std::vector<std::string> words{"bench", "serve"};
  words.insert(words.end(), args.begin(), args.end());
  return run_tandem(words);
}

TEST(ServeBench, Help) {
  EXPECT_THAT(run_tandem({"bench", "--help"}).out, HasSubstr("\n  serve "));
  const Outcome help = bench_serve({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* option : {"--url", "--request-rate", "--concurrency", "--dataset", "--goodput",
                             "--flush-cache", "--json", "--html", "--log-level"}) {
    EXPECT_THAT(help.out, HasSubstr(option));
  }
}

TEST(ServeBench, UsageErrors) {
  EXPECT_EQ(bench_serve({}).exit_code, 2);  // neither a concurrency nor a rate
  EXPECT_EQ(bench_serve({"--concurrency", "0"}).exit_code, 2);
  EXPECT_EQ(bench_serve({"--request-rate", "1", "--replay"}).exit_code, 2);
  const Outcome dataset = bench_serve({"--concurrency", "1", "--dataset", "mmlu"});
  EXPECT_EQ(dataset.exit_code, 2);
  EXPECT_THAT(dataset.err, HasSubstr("sharegpt-like"));
}

TEST(ServeBench, BadInputIsNamed) {
  const auto message = [](std::vector<std::string> args) {
    args.insert(args.end(), {"--concurrency", "1"});
    const Outcome outcome = bench_serve(args);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_EQ(outcome.out, "");
    return outcome.err;
  };
  EXPECT_THAT(message({"--url", "localhost:1"}),
              HasSubstr("--url 'localhost:1': expected http://"));
  EXPECT_THAT(message({"--url", "http://127.0.0.1:1"}),
              HasSubstr("cannot connect to http://127.0.0.1:1: Connection refused"));
  EXPECT_THAT(message({"--url", "http://127.0.0.1:1", "--endpoint", "generate"}),
              HasSubstr("warm-up request to http://127.0.0.1:1/generate: cannot connect"));
  EXPECT_THAT(message({"--goodput", "ttft:x"}), HasSubstr("--goodput 'ttft:x': expected"));
  EXPECT_THAT(message({"--num-prompts", "0"}), HasSubstr("--num-prompts is 0: expected"));
  EXPECT_THAT(message({"--replay"}), HasSubstr("--replay: expected --dataset jsonl"));
  EXPECT_THAT(message({"--dataset", "jsonl"}), HasSubstr("--dataset-path FILE"));
}

}  // namespace
}  // namespace tandem
