// init and inspect: a good checkpoint, and every kind of bad one.
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/demo_checkpoint.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using test::DemoFiles;
using test::Outcome;
using test::read_text;
using test::run_tandem;
using test::RunSettings;
using test::snapshot;
using test::TempDir;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

void replace_in(const std::string& path, const std::string& from, const std::string& to) {
  std::string text = read_text(path);
  const std::size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  write_text(path, text);
}

/// Exit code 1 and one message that names all of `parts`.
void expect_bad_input(const Outcome& outcome, const std::vector<std::string>& parts) {
  EXPECT_EQ(outcome.exit_code, 1) << outcome.err;
  EXPECT_THAT(outcome.err, StartsWith("tandem: "));
  for (const std::string& part : parts) {
    EXPECT_THAT(outcome.err, HasSubstr(part));
  }
}

TEST(Init, SameSeedGivesTheSameBytesAndAnotherSeedOthers) {
  const TempDir dir;
  for (const char* name : {"a", "b"}) {
    ASSERT_EQ(run_tandem({"init", "k3-nano", dir.path() + "/" + name, "--seed", "3"}).exit_code, 0);
  }
  ASSERT_EQ(run_tandem({"init", "k3-nano", dir.path() + "/c", "--seed", "4"}).exit_code, 0);
  const std::string a = read_text(dir.path() + "/a/model.safetensors");
  ASSERT_FALSE(a.empty());
  EXPECT_TRUE(a == read_text(dir.path() + "/b/model.safetensors"));
  EXPECT_FALSE(a == read_text(dir.path() + "/c/model.safetensors"));
}

TEST(Init, NeverOverwrites) {
  const TempDir dir;
  ASSERT_EQ(run_tandem({"init", "k3-nano", dir.path() + "/m"}).exit_code, 0);
  const auto before = snapshot(dir.path());
  expect_bad_input(run_tandem({"init", "k3-nano", dir.path() + "/m", "--seed", "9"}),
                   {dir.path() + "/m", "already holds a checkpoint"});
  EXPECT_TRUE(before == snapshot(dir.path()));
}

TEST(Init, BadInputNamesItAndWritesNothing) {
  const TempDir dir;
  expect_bad_input(run_tandem({"init", "k3-nan", dir.path() + "/m"}),
                   {"'k3-nan'", "k3-nano, k3-tiny, k3-mini"});
  expect_bad_input(
      run_tandem({"init", "k3-nano", dir.path() + "/m", "--tokenizer", dir.path() + "/no.json"}),
      {dir.path() + "/no.json"});
  write_text(dir.path() + "/t.json",
             R"({"type": "char", "tokens": ["a", "b"], "special": ["<unk>"], "stop": []})");
  expect_bad_input(
      run_tandem({"init", "k3-nano", dir.path() + "/m", "--tokenizer", dir.path() + "/t.json"}),
      {dir.path() + "/t.json", "\"stop\""});
  write_text(
      dir.path() + "/t.json",
      R"({"type": "char", "tokens": ["a", "b"], "special": ["<unk>", "<eos>"], "stop": ["<eos>"]})");
  expect_bad_input(run_tandem({"init", "k3-nano", dir.path() + "/m", "--tokenizer",
                               dir.path() + "/t.json", "--vocab-size", "3"}),
                   {"--vocab-size 3", "at least 4"});
  EXPECT_FALSE(fs::exists(dir.path() + "/m"));
}

TEST(Init, FullDiskIsAnErrorAndLeavesNoHalfFile) {
  const TempDir dir;
  RunSettings settings;
  settings.max_file_bytes = 100000;  // the weights need some MB
  const Outcome outcome = run_tandem({"init", "k3-nano", dir.path() + "/m"}, settings);
  EXPECT_EQ(outcome.exit_code, 3) << outcome.err;
  EXPECT_THAT(outcome.err, AllOf(StartsWith("tandem: "), HasSubstr("model.safetensors")));
  EXPECT_TRUE(snapshot(dir.path()).empty());
}

class Inspect : public ::testing::Test {
 protected:
  [[nodiscard]] std::string weights() const { return files_.model() + "/model.safetensors"; }
  [[nodiscard]] std::string config() const { return files_.model() + "/config.json"; }
  [[nodiscard]] Outcome inspect(std::vector<std::string> flags = {}) const {
    flags.insert(flags.begin(), {"inspect", files_.model()});
    return run_tandem(flags);
  }

  const DemoFiles files_{"k3-tiny"};
};

TEST_F(Inspect, ShowsConfigSizesAndMemoryPlan) {
  const Outcome outcome = inspect({"--max-running-seqs", "4", "--max-seq-len", "64"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("num_hidden_layers                9\n"),
                                 HasSubstr("memory plan for 4 running sequences of 64 tokens"),
                                 HasSubstr("latent pages"), HasSubstr("4 slots")));
  EXPECT_THAT(outcome.out, Not(HasSubstr("lm_head.weight")));
}

TEST_F(Inspect, MemoryPlanWithSmallerCacheElements) {
  EXPECT_THAT(inspect().out, HasSubstr("each (fp32)"));
  EXPECT_THAT(inspect({"--kv-cache-dtype", "fp8"}).out, HasSubstr("each (fp8)"));
  EXPECT_EQ(inspect({"--kv-cache-dtype", "int4"}).exit_code, 2);
}

TEST_F(Inspect, ListsTensorsWithoutLoading) {
  const Outcome outcome = inspect({"--tensors", "--no-load"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("lm_head.weight"));
  EXPECT_THAT(outcome.out, Not(HasSubstr("memory plan")));
}

TEST_F(Inspect, MissingFolder) {
  expect_bad_input(run_tandem({"inspect", files_.file("nowhere")}), {files_.file("nowhere")});
}

TEST_F(Inspect, TruncatedWeights) {
  fs::resize_file(weights(), fs::file_size(weights()) - 100);
  expect_bad_input(inspect(), {"model.safetensors", "bytes"});
}

TEST_F(Inspect, WrongShape) {
  replace_in(config(), "\"kv_lora_rank\": 64", "\"kv_lora_rank\": 60");
  expect_bad_input(inspect(), {"tensor ", "expected shape"});
}

TEST_F(Inspect, MissingTensor) {
  replace_in(weights(), "lm_head.weight", "ln_head.weight");
  expect_bad_input(inspect(), {"lm_head.weight"});
}

TEST_F(Inspect, UnknownConfigField) {
  replace_in(config(), "\"kv_lora_rank\"", "\"kv_lora_rang\"");
  expect_bad_input(inspect(), {config(), "kv_lora_rank"});
}

TEST_F(Inspect, ConfigThatIsNotJson) {
  write_text(config(), "{\"model_type\": ");
  expect_bad_input(inspect(), {config()});
}

TEST_F(Inspect, MemoryPlanThatCannotBe) {
  expect_bad_input(inspect({"--max-seq-len", "2000000000000"}), {"max_seq_len"});
}

TEST_F(Inspect, TokenizerLargerThanTheModel) {
  const std::string other = files_.file("small");
  ASSERT_EQ(run_tandem({"init", "k3-nano", other, "--vocab-size", "16"}).exit_code, 0);
  fs::copy_file(files_.model() + "/char_tokenizer.json", other + "/char_tokenizer.json");
  expect_bad_input(run_tandem({"generate", other, "--prompt", "a"}),
                   {other, "the model's vocab_size 16"});
}

}  // namespace
}  // namespace tandem
