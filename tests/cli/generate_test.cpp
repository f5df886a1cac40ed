// generate and chat: results that do not depend on company, streams, and bad input.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/demo_checkpoint.h"

namespace tandem {
namespace {

using nlohmann::json;
using test::DemoFiles;
using test::Outcome;
using test::run_tandem;
using test::RunSettings;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const std::vector<std::string> kPrompts = {
    "Tom has 3 pens. He gets 4 more. He loses 2. How many pens?", "Anna has 9 apples",
    "1+1=", "Ben starts with 2 coins. He wins 8 more. Then he sells 5. How many now?"};

std::vector<json> json_lines(const std::string& text) {
  std::vector<json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    lines.push_back(json::parse(line));
  }
  return lines;
}

class Generate : public ::testing::Test {
 protected:
  // Shared by the tests, which only read it.
  static void SetUpTestSuite() { files_ = new DemoFiles("k3-tiny"); }
  static void TearDownTestSuite() {
    delete files_;
    files_ = nullptr;
  }

  static Outcome generate(const std::vector<std::string>& prompts, std::vector<std::string> flags,
                          const RunSettings& settings = {}) {
    for (const std::string& prompt : prompts) {
      flags.insert(flags.end(), {"--prompt", prompt});
    }
    flags.insert(flags.begin(), {"generate", files_->model(), "--threads", "2"});
    return run_tandem(flags, settings);
  }

  static void expect_together_equals_alone(const std::vector<std::string>& sampling) {
    std::vector<std::string> flags{"--json", "--logprobs", "--max-new-tokens", "24"};
    flags.insert(flags.end(), sampling.begin(), sampling.end());
    const Outcome together = generate(kPrompts, flags);
    ASSERT_EQ(together.exit_code, 0) << together.err;
    const std::vector<json> all = json_lines(together.out);
    ASSERT_EQ(all.size(), kPrompts.size());
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      const Outcome alone = generate({kPrompts[i]}, flags);
      ASSERT_EQ(alone.exit_code, 0) << alone.err;
      const std::vector<json> one = json_lines(alone.out);
      ASSERT_EQ(one.size(), 1U);
      for (const char* key : {"prompt", "text", "tokens", "finish_reason", "logprobs"}) {
        EXPECT_EQ(one[0].at(key).dump(), all[i].at(key).dump()) << kPrompts[i] << ": " << key;
      }
      EXPECT_EQ(all[i].at("logprobs").size(), all[i].at("tokens").size());
    }
  }

  static inline DemoFiles* files_ = nullptr;
};

TEST_F(Generate, ManyPromptsTogetherEqualEachAloneGreedy) {
  expect_together_equals_alone({"--temperature", "0"});
}

TEST_F(Generate, ManyPromptsTogetherEqualEachAloneSampled) {
  expect_together_equals_alone({"--temperature", "0.9", "--top-p", "0.95", "--seed", "11"});
}

TEST_F(Generate, TheOrderAndTheThreadsChangeNothing) {
  const std::vector<std::string> flags{"--json", "--logprobs", "--max-new-tokens", "16"};
  const std::vector<json> forward = json_lines(generate(kPrompts, flags).out);
  std::vector<std::string> one_thread = flags;
  one_thread.insert(one_thread.end(), {"--threads", "1", "--max-running-seqs", "2"});
  const std::vector<std::string> reversed(kPrompts.rbegin(), kPrompts.rend());
  std::vector<std::string> args{"generate", files_->model()};
  args.insert(args.end(), one_thread.begin(), one_thread.end());
  for (const std::string& prompt : reversed) {
    args.insert(args.end(), {"--prompt", prompt});
  }
  const std::vector<json> backward = json_lines(run_tandem(args).out);
  ASSERT_EQ(forward.size(), kPrompts.size());
  ASSERT_EQ(backward.size(), kPrompts.size());
  for (std::size_t i = 0; i < forward.size(); ++i) {
    const json& other = backward[backward.size() - 1 - i];
    EXPECT_EQ(forward[i].at("tokens").dump(), other.at("tokens").dump());
    EXPECT_EQ(forward[i].at("logprobs").dump(), other.at("logprobs").dump());
  }
}

TEST_F(Generate, SameSeedSameTextAndSamplesDiffer) {
  const std::vector<std::string> flags{"--json", "--n", "4", "--max-new-tokens", "16", "--seed"};
  const auto with_seed = [&](const char* seed) {
    std::vector<std::string> copy = flags;
    copy.emplace_back(seed);
    return generate({kPrompts[0]}, copy).out;
  };
  const std::string first = with_seed("5");
  EXPECT_EQ(first, with_seed("5"));
  EXPECT_NE(first, with_seed("6"));
  const std::vector<json> samples = json_lines(first);
  ASSERT_EQ(samples.size(), 4U);
  EXPECT_NE(samples[0].at("tokens"), samples[1].at("tokens"));
}

TEST_F(Generate, TheStreamedTextIsTheText) {
  const std::vector<std::string> flags{"--max-new-tokens", "20", "--temperature", "0"};
  const Outcome streamed = generate({kPrompts[0]}, flags);
  ASSERT_EQ(streamed.exit_code, 0) << streamed.err;
  std::vector<std::string> as_json = flags;
  as_json.emplace_back("--json");
  const auto lines = json_lines(generate({kPrompts[0]}, as_json).out);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(streamed.out, lines[0].at("text").get<std::string>() + "\n");
  EXPECT_THAT(streamed.err, HasSubstr("tok/s"));
}

TEST_F(Generate, ReadsAGsm8kFile) {
  const Outcome outcome =
      run_tandem({"generate", files_->model(), "--prompt-file", files_->data() + "/test.jsonl",
                  "--limit", "3", "--json", "--max-new-tokens", "4"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(json_lines(outcome.out).size(), 3U);
}

TEST_F(Generate, BadPromptFileNamesTheLine) {
  write_text(files_->file("bad.jsonl"),
             "{\"question\": \"a\", \"answer\": \"b\"}\n{\"question\": 3}\n");
  const Outcome outcome =
      run_tandem({"generate", files_->model(), "--prompt-file", files_->file("bad.jsonl")});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr(files_->file("bad.jsonl") + ":2: "));
}

TEST_F(Generate, EmptyRawPrompt) {
  const Outcome outcome = generate({"a", ""}, {"--raw"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("prompt 2: expected at least one token"));
}

TEST_F(Generate, ALengthThatCannotBe) {
  const Outcome outcome = generate({"a"}, {"--max-new-tokens", "2000000000"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, AllOf(StartsWith("tandem: "), HasSubstr("max_seq_len")));
}

TEST_F(Generate, AClosedPipeEndsQuietly) {
  RunSettings settings;
  settings.close_stdout_reader = true;
  const Outcome outcome = generate(kPrompts, {"--max-new-tokens", "4"}, settings);
  EXPECT_EQ(outcome.signal, 0);
  EXPECT_EQ(outcome.exit_code, 141);
  EXPECT_THAT(outcome.err, Not(HasSubstr("tandem:")));
}

TEST_F(Generate, AFullDiskUnderTheOutputIsAnError) {
  RunSettings settings;
  settings.stdout_path = "/dev/full";
  const Outcome outcome = generate(kPrompts, {"--max-new-tokens", "4"}, settings);
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.err, HasSubstr("standard output: cannot write: No space left on device"));
}

TEST_F(Generate, InterruptedKeepsWhatThereIs) {
  RunSettings settings;
  const std::string out = files_->file("out.txt");
  settings.stdout_path = out;
  settings.interrupt_when = [&out] { return test::read_text(out).size() > 2; };
  // Greedy text of random weights goes on for ever.
  const Outcome outcome =
      generate({kPrompts[0]}, {"--temperature", "0", "--max-new-tokens", "1000000"}, settings);
  EXPECT_EQ(outcome.exit_code, 130) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("tandem: stopping"));
  EXPECT_THAT(test::read_text(out), ::testing::EndsWith("\n"));
}

TEST_F(Generate, ProfileListsOperations) {
  const Outcome outcome = generate({kPrompts[0]}, {"--max-new-tokens", "2", "--profile"});
  ASSERT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("share"), HasSubstr("kda")));
}

class Chat : public Generate {
 protected:
  static Outcome chat(const std::string& input, std::vector<std::string> flags = {}) {
    flags.insert(flags.begin(),
                 {"chat", files_->model(), "--temperature", "0", "--max-new-tokens", "12"});
    RunSettings settings;
    settings.input = input;
    return run_tandem(flags, settings);
  }
};

TEST_F(Chat, AnswersALineAsGenerateDoes) {
  const Outcome outcome = chat(kPrompts[0] + "\n");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out,
            generate({kPrompts[0]}, {"--temperature", "0", "--max-new-tokens", "12"}).out);
}

TEST_F(Chat, QuestionsOfAPlainModelAreIndependent) {
  const std::string alone = chat(kPrompts[1] + "\n").out;
  EXPECT_EQ(chat(kPrompts[0] + "\n" + kPrompts[1] + "\n").out,
            chat(kPrompts[0] + "\n").out + alone);
}

TEST_F(Chat, HistoryIsKeptWhenAskedForAndResetForgetsIt) {
  const std::string alone = chat(kPrompts[1] + "\n").out;
  const std::string first = chat(kPrompts[0] + "\n").out;
  const std::string both = kPrompts[0] + "\n" + kPrompts[1] + "\n";
  EXPECT_NE(chat(both, {"--keep-history"}).out, first + alone);
  EXPECT_EQ(chat(kPrompts[0] + "\n/reset\n" + kPrompts[1] + "\n", {"--keep-history"}).out,
            first + alone);
}

TEST_F(Chat, Commands) {
  const Outcome outcome = chat("/help\n/fly\n\n/exit\n" + kPrompts[0] + "\n");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("/reset"), HasSubstr("unknown command '/fly'")));
}

TEST_F(Chat, AQuestionThatDoesNotFit) {
  const Outcome outcome = chat(kPrompts[0] + "\n", {"--max-seq-len", "4"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, AllOf(StartsWith("tandem: "), HasSubstr("--max-seq-len 4")));
}

}  // namespace
}  // namespace tandem
