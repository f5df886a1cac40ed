// sft, rl and report: from a config to results; bad input, full disk, Ctrl-C, diverging loss.
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/mount.h>

#include "cli/demo_checkpoint.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::DemoFiles;
using test::Outcome;
using test::read_text;
using test::run_tandem;
using test::RunSettings;
using test::snapshot;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::int64_t num_lines(const std::string& path) {
  const std::string text = read_text(path);
  return std::count(text.begin(), text.end(), '\n');
}

void expect_bad_input(const Outcome& outcome, const std::vector<std::string>& parts) {
  EXPECT_EQ(outcome.exit_code, 1) << outcome.err;
  EXPECT_THAT(outcome.err, StartsWith("tandem: "));
  for (const std::string& part : parts) {
    EXPECT_THAT(outcome.err, HasSubstr(part));
  }
}

class Training : public ::testing::Test {
 protected:
  Training() {
    write_text(sft_config(), fmt_config("sft.jsonl") +
                                 "[train]\nglobal_batch_size = 4\ntrain_iters = 4\n"
                                 "[optimizer]\nlr = 1e-3\n");
    write_text(rl_config(),
               fmt_config("train.jsonl") +
                   "[rollout]\nrollout_batch_size = 2\nn_samples_per_prompt = 4\nnum_rollout = 3\n"
                   "rollout_max_response_len = 12\n"
                   "[train]\nnum_steps_per_rollout = 1\n"
                   "[optimizer]\nlr = 1e-3\n"
                   "[eval]\neval_prompt_data = \"" +
                   files_.data() + "/test.jsonl\"\neval_interval = 2\n");
  }

  [[nodiscard]] std::string fmt_config(const std::string& data) const {
    return "[model]\nload = \"" + files_.model() + "\"\n[data]\nprompt_data = \"" + files_.data() +
           "/" + data + "\"\ninput_key = \"question\"\nlabel_key = \"answer\"\n";
  }
  [[nodiscard]] std::string sft_config() const { return files_.file("sft.toml"); }
  [[nodiscard]] std::string rl_config() const { return files_.file("rl.toml"); }
  [[nodiscard]] std::string runs(const std::string& name = "") const {
    return files_.file("runs") + (name.empty() ? "" : "/" + name);
  }
  [[nodiscard]] Outcome train(const std::string& command, const std::string& name,
                              const std::vector<std::string>& flags = {},
                              const RunSettings& settings = {}) const {
    std::vector<std::string> args{command,     command == "sft" ? sft_config() : rl_config(),
                                  "--threads", "2",
                                  "--dir",     runs(),
                                  "--name",    name};
    args.insert(args.end(), flags.begin(), flags.end());
    return run_tandem(args, settings);
  }
  [[nodiscard]] std::string weights(const std::string& name) const {
    return read_text(runs(name) + "/model/model.safetensors");
  }

  const DemoFiles files_{"k3-nano"};
};

TEST_F(Training, SftThenRlThenReport) {
  const Outcome sft = train("sft", "base");
  ASSERT_EQ(sft.exit_code, 0) << sft.err;
  EXPECT_THAT(sft.out,
              AllOf(HasSubstr("lr = 0.001"), HasSubstr("sft.toml:"), HasSubstr("last loss"),
                    HasSubstr("tandem chat " + runs("base") + "/model")));
  EXPECT_EQ(num_lines(runs("base") + "/sft.jsonl"), 4);

  const Outcome rl = train("rl", "policy", {"--set", "model.load=" + runs("base") + "/model"});
  ASSERT_EQ(rl.exit_code, 0) << rl.err;
  for (const char* part : {"step    0", "step    3", "eval ", "mismatch 0", "memory plan"}) {
    EXPECT_THAT(rl.out, HasSubstr(part));
  }
  EXPECT_THAT(rl.out, HasSubstr("tandem chat " + runs("policy") + "/model"));
  EXPECT_TRUE(fs::exists(runs("policy") + "/report.html"));

  const std::string page = files_.file("page.html");
  const Outcome report = run_tandem({"report", runs("policy"), runs("policy"), "--out", page});
  ASSERT_EQ(report.exit_code, 0) << report.err;
  EXPECT_THAT(report.out, AllOf(HasSubstr("policy"), HasSubstr(page)));
  EXPECT_THAT(read_text(page), HasSubstr("<html"));

  RunSettings question;
  question.input = "Tom has 3 pens.\n";
  const Outcome chat =
      run_tandem({"chat", runs("policy") + "/model", "--max-new-tokens", "4"}, question);
  EXPECT_EQ(chat.exit_code, 0) << chat.err;
}

TEST_F(Training, AllConfigProblemsAtOnceEachWithItsPlace) {
  write_text(sft_config(),
             "[model]\nload = \"x\"\n[optimizer]\nlearning_rate = 1\nlr = \"fast\"\n");
  expect_bad_input(train("sft", "a", {"--set", "train.seeed=3"}),
                   {"sft.toml:4: unknown key 'learning_rate'", "sft.toml:5: optimizer.lr",
                    "--set train.seeed=3"});
  EXPECT_FALSE(fs::exists(runs()));
}

TEST_F(Training, MissingFilesAreNamed) {
  expect_bad_input(run_tandem({"sft", files_.file("no.toml")}), {files_.file("no.toml")});
  expect_bad_input(train("sft", "a", {"--prompt-data", files_.file("no.jsonl")}),
                   {files_.file("no.jsonl")});
  expect_bad_input(train("rl", "b", {"--set", "model.load=" + files_.file("no_model")}),
                   {files_.file("no_model")});
  expect_bad_input(run_tandem({"report", files_.file("no_run")}), {files_.file("no_run")});
  expect_bad_input(train("sft", "c", {"--resume"}), {runs("c"), "nothing to resume"});
}

TEST_F(Training, AStartThatFailedLeavesNothingInTheWay) {
  const Outcome failed = train("sft", "a", {"--prompt-data", files_.file("no.jsonl")});
  ASSERT_EQ(failed.exit_code, 1);
  EXPECT_EQ(train("sft", "a").exit_code, 0);
  // A folder that was there before the run stays.
  fs::create_directories(runs("mine"));
  write_text(runs("mine") + "/notes.txt", "keep me");
  ASSERT_EQ(train("rl", "mine", {"--prompt-data", files_.file("no.jsonl")}).exit_code, 1);
  EXPECT_EQ(read_text(runs("mine") + "/notes.txt"), "keep me");
  EXPECT_EQ(train("rl", "mine").exit_code, 0);
}

TEST_F(Training, AnExportNeverReplacesAFolder) {
  const std::string out = files_.file("out");
  fs::create_directories(out);
  write_text(out + "/notes.txt", "keep me");
  expect_bad_input(train("sft", "a", {"--save-hf", out}), {"checkpoint.save_hf", out});
  EXPECT_EQ(read_text(out + "/notes.txt"), "keep me");
}

TEST_F(Training, ExamplesAreValidConfigs) {
  std::int64_t num_examples = 0;
  for (const auto& entry : fs::directory_iterator(TDM_SOURCE_DIR "/examples")) {
    if (entry.path().extension() != ".toml") {
      continue;
    }
    ++num_examples;
    const std::string name = entry.path().filename().string();
    RunSettings settings;
    settings.dir = files_.file("");  // where none of the data they name is
    const Outcome outcome = run_tandem(
        {name.find("sft") != std::string::npos ? "sft" : "rl", entry.path().string()}, settings);
    // A config problem would name a line of the file; a missing file is all that may be wrong.
    EXPECT_EQ(outcome.exit_code, 1) << name;
    EXPECT_THAT(outcome.err, Not(HasSubstr(name))) << name;
  }
  EXPECT_GT(num_examples, 0);
}

TEST_F(Training, ARunIsNeverOverwritten) {
  ASSERT_EQ(train("sft", "a").exit_code, 0);
  const auto before = snapshot(runs());
  expect_bad_input(train("sft", "a"), {runs("a"), "--resume"});
  EXPECT_TRUE(before == snapshot(runs()));
}

/// Waits until the run has finished a step, then sends Ctrl-C.
RunSettings interrupt_after_first_line(const std::string& path) {
  RunSettings settings;
  settings.interrupt_when = [path] { return num_lines(path) > 0; };
  return settings;
}

TEST_F(Training, SftStoppedByCtrlCResumesToTheSameBits) {
  const std::vector<std::string> steps{"--train-iters", "50"};
  ASSERT_EQ(train("sft", "whole", steps).exit_code, 0);
  const Outcome stopped =
      train("sft", "cut", steps, interrupt_after_first_line(runs("cut") + "/sft.jsonl"));
  ASSERT_EQ(stopped.exit_code, 130) << stopped.err;
  EXPECT_THAT(stopped.err, AllOf(HasSubstr("finishing the step in flight"), HasSubstr("--resume")));
  ASSERT_LT(num_lines(runs("cut") + "/sft.jsonl"), 50);
  EXPECT_FALSE(fs::exists(runs("cut") + "/model"));

  std::vector<std::string> resume = steps;
  resume.emplace_back("--resume");
  const Outcome resumed = train("sft", "cut", resume);
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(num_lines(runs("cut") + "/sft.jsonl"), 50);
  EXPECT_TRUE(weights("whole") == weights("cut"));
}

TEST_F(Training, RlStoppedOrKilledResumesToTheSameBits) {
  const std::vector<std::string> steps{"--num-rollout", "8"};
  std::vector<std::string> resume = steps;
  resume.emplace_back("--resume");
  ASSERT_EQ(train("rl", "whole", steps).exit_code, 0);
  for (const int signal : {SIGINT, SIGKILL}) {
    const std::string name = signal == SIGINT ? "stopped" : "killed";
    const std::string metrics = runs(name) + "/metrics.jsonl";
    RunSettings settings = interrupt_after_first_line(metrics);
    settings.signal = signal;
    const Outcome cut = train("rl", name, steps, settings);
    ASSERT_EQ(cut.exit_code, signal == SIGINT ? 130 : -1) << cut.err;
    ASSERT_LT(num_lines(metrics), 9);
    const Outcome resumed = train("rl", name, resume);
    ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
    EXPECT_EQ(num_lines(metrics), 9);  // step 0 is the first evaluation
    EXPECT_TRUE(weights("whole") == weights(name)) << name;
  }
}

TEST_F(Training, TwoCtrlCQuitAtOnceAndTheRunStillResumes) {
  const std::vector<std::string> steps{"--num-rollout", "4000"};
  RunSettings settings = interrupt_after_first_line(runs("cut") + "/metrics.jsonl");
  settings.num_interrupts = 2;
  const Outcome stopped = train("rl", "cut", steps, settings);
  EXPECT_EQ(stopped.exit_code, 130) << stopped.err;
  std::vector<std::string> resume = steps;
  resume.emplace_back("--resume");
  RunSettings again;
  const std::int64_t kept = num_lines(runs("cut") + "/metrics.jsonl");
  again.interrupt_when = [this, kept] { return num_lines(runs("cut") + "/metrics.jsonl") > kept; };
  const Outcome resumed = train("rl", "cut", resume, again);
  EXPECT_EQ(resumed.exit_code, 130) << resumed.err;
  EXPECT_GT(num_lines(runs("cut") + "/metrics.jsonl"), kept);
}

TEST_F(Training, ADivergingLossStopsTheRunAndSaysSo) {
  const Outcome outcome =
      train("sft", "nan", {"--train-iters", "40", "--lr", "1e30", "--clip-grad", "0"});
  EXPECT_EQ(outcome.exit_code, 3) << outcome.out;
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("tandem: step "), HasSubstr("optimizer.lr")));
  EXPECT_FALSE(fs::exists(runs("nan") + "/model"));
  EXPECT_GE(num_lines(runs("nan") + "/sft.jsonl"), 1);
}

TEST_F(Training, DivergingWeightsStopAnRlRunAndSaySo) {
  const Outcome outcome =
      train("sft", "big", {"--train-iters", "1", "--lr", "1e30", "--clip-grad", "0"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Outcome rl = train("rl", "nan", {"--set", "model.load=" + runs("big") + "/model"});
  EXPECT_EQ(rl.exit_code, 3) << rl.out;
  EXPECT_THAT(rl.err, AllOf(HasSubstr("responses could be computed"), HasSubstr("optimizer.lr")));
  EXPECT_FALSE(fs::exists(runs("nan") + "/model"));
}

TEST_F(Training, AClosedPipeDoesNotEndARun) {
  RunSettings settings;
  settings.close_stdout_reader = true;
  const Outcome outcome = train("sft", "a", {}, settings);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_FALSE(weights("a").empty());
}

TEST_F(Training, AFileLimitActsAsAFullDiskAndTheRunResumes) {
  ASSERT_EQ(train("sft", "whole").exit_code, 0);
  RunSettings settings;
  settings.max_file_bytes = 1000000;  // the log fits, the weights do not
  const Outcome full = train("sft", "cut", {}, settings);
  EXPECT_EQ(full.exit_code, 3) << full.err;
  EXPECT_THAT(full.err, AllOf(StartsWith("tandem: "), HasSubstr(".safetensors: cannot write")));
  EXPECT_FALSE(fs::exists(runs("cut") + "/model"));
  const Outcome resumed = train("sft", "cut", {"--resume"});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_TRUE(weights("whole") == weights("cut"));
}

/// A file system of its own with little room; only root may make one.
class SmallDisk {
 public:
  explicit SmallDisk(const std::string& dir, const char* size) : dir_(dir) {
    fs::create_directories(dir);
    const std::string options = std::string("size=") + size;
    is_mounted_ = ::mount("tmpfs", dir.c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  ~SmallDisk() {
    if (is_mounted_) {
      ::umount(dir_.c_str());
    }
  }
  [[nodiscard]] bool is_mounted() const { return is_mounted_; }
  /// Grows it, as somebody who makes room.
  [[nodiscard]] bool grow(const char* size) const {
    const std::string options = std::string("size=") + size;
    return ::mount("tmpfs", dir_.c_str(), "tmpfs", MS_REMOUNT, options.c_str()) == 0;
  }

 private:
  std::string dir_;
  bool is_mounted_ = false;
};

TEST_F(Training, AFullDiskKeepsEveryFinishedStep) {
  const SmallDisk disk(runs(), "20m");
  if (!disk.is_mounted()) {
    GTEST_SKIP() << "mounting a small tmpfs needs root; AFileLimitActsAsAFullDiskAndTheRunResumes "
                    "covers the same code";
  }
  const std::vector<std::string> flags{"--num-rollout", "4"};
  const Outcome full = train("rl", "cut", flags);
  EXPECT_EQ(full.exit_code, 3) << full.err << full.out;
  EXPECT_THAT(full.err, AllOf(HasSubstr("tandem: "), HasSubstr("disk full")));
  ASSERT_TRUE(disk.grow("400m"));
  std::vector<std::string> resume = flags;
  resume.emplace_back("--resume");
  const Outcome resumed = train("rl", "cut", resume);
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(num_lines(runs("cut") + "/metrics.jsonl"), 5);
  ASSERT_EQ(train("rl", "whole", flags).exit_code, 0);
  EXPECT_TRUE(weights("whole") == weights("cut"));
}

}  // namespace
}  // namespace tandem
