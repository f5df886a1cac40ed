#include "train/config.h"

#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temp_path.h"
#include "train/toml_config.h"

namespace tandem {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string write_file(const std::string& name, const std::string& text) {
  const std::string path = temp_path(name);
  std::ofstream(path) << text;
  return path;
}

constexpr const char* kSmallRl = R"toml(
[model]
load = "base"
[data]
prompt_data = "train.jsonl"
[rollout]
num_rollout = 50
[train]
num_steps_per_rollout = 1
)toml";

Expected<Resolved<RlConfig>> load_rl(const std::string& text, std::vector<std::string> flags = {}) {
  return load_config<RlConfig>({write_file("rl.toml", text), std::move(flags)});
}

std::string rl_error(const std::string& extra, std::vector<std::string> flags = {}) {
  const auto loaded = load_rl(kSmallRl + extra, std::move(flags));
  return loaded.ok() ? "no error" : loaded.message();
}

TEST(Config, ReadsEveryTypeAndRemembersOrigins) {
  const auto loaded = load_rl(R"toml(
[model]
init = "k3-nano"
[data]
prompt_data = "train.jsonl"
rollout_shuffle = true
[rollout]
num_rollout = 50
rollout_temperature = 1
rollout_stop = ["a", "b"]
[train]
num_steps_per_rollout = 2
[optimizer]
lr = 3e-4
)toml",
                              {"--set", "algo.eps_clip_high=0.28", "--n-samples-per-prompt", "4"});
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  const RlConfig& c = loaded->config;
  EXPECT_EQ(c.model.init, "k3-nano");
  EXPECT_TRUE(c.data.rollout_shuffle);
  EXPECT_EQ(c.rollout.rollout_temperature, 1.0);
  EXPECT_EQ(c.rollout.rollout_stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(c.optimizer.lr, 3e-4);
  EXPECT_EQ(c.algo.eps_clip_high, 0.28);
  EXPECT_EQ(c.rollout.n_samples_per_prompt, 4);
  EXPECT_EQ(c.train.global_batch_size, 64);  // 32 * 4 / 2
  EXPECT_EQ(c.eval.eval_max_response_len, 1024);

  const Origins& origins = loaded->origins;
  EXPECT_EQ(origins.at("optimizer.lr").kind, OriginKind::kFile);
  EXPECT_THAT(origins.at("optimizer.lr").where, HasSubstr("rl.toml:14"));
  EXPECT_EQ(origins.at("algo.eps_clip_high").kind, OriginKind::kFlag);
  EXPECT_EQ(origins.at("train.global_batch_size").kind, OriginKind::kDerived);
  EXPECT_EQ(origins.count("optimizer.adam_beta1"), 0U);
}

TEST(Config, ResolvedTextIsTomlThatReadsBackTheSame) {
  const auto loaded = load_rl(std::string(kSmallRl) + "[run]\nname = \"a \\\"quoted\\\" \\n name\"",
                              {"--lr=1e-7", "--rollout-stop", "x,y"});
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  const std::string text = loaded->text();
  EXPECT_THAT(text, HasSubstr("lr = 1e-07"));
  EXPECT_THAT(text, HasSubstr("# --lr"));
  EXPECT_THAT(text, HasSubstr("# default"));
  EXPECT_THAT(text, HasSubstr("# num_epoch is unset"));
  const auto again = load_rl(text);
  ASSERT_TRUE(again.ok()) << again.message();
  RlConfig a = loaded->config;
  RlConfig b = again->config;
  EXPECT_EQ(print_resolved(fields_of(a), {}), print_resolved(fields_of(b), {}));
}

TEST(Config, UnknownNamesAreRefusedWithTheNearestKnownAndTheLine) {
  EXPECT_THAT(rl_error("[optimizer]\nlearning_rate = 1\n"), HasSubstr("rl.toml:11"));
  EXPECT_THAT(rl_error("[optimizer]\nadam_beta = 1\n"),
              AllOf(HasSubstr("unknown key 'adam_beta' in [optimizer]"), HasSubstr("adam_beta1")));
  EXPECT_THAT(rl_error("[optimiser]\nlr = 1\n"),
              AllOf(HasSubstr("[optimiser]"), HasSubstr("[optimizer]"), HasSubstr("rl.toml:10")));
  EXPECT_THAT(rl_error("", {"--rollout-batchsize", "3"}), HasSubstr("'--rollout-batch-size'"));
  EXPECT_THAT(rl_error("", {"--max-tokens-per-gpu", "3"}),
              HasSubstr("'--max-tokens-per-microbatch'"));
  EXPECT_THAT(rl_error("", {"--set", "algo.epsclip=3"}), HasSubstr("'eps_clip'"));
  EXPECT_THAT(rl_error("", {"--set", "alg.eps_clip=3"}), HasSubstr("[algo]"));
  EXPECT_THAT(load_rl("lr = 1\n").message(), HasSubstr("stands outside any table"));
  EXPECT_THAT(load_rl("train = 1\n").message(), HasSubstr("write [train]"));
}

TEST(Config, WrongTypesNameTheKeyAndTheExpectedType) {
  EXPECT_THAT(rl_error("[optimizer]\nlr = \"fast\"\n"),
              AllOf(HasSubstr("rl.toml:11"), HasSubstr("optimizer.lr: expected a finite number")));
  EXPECT_THAT(rl_error("[optimizer]\nlr = inf\n"), HasSubstr("expected a finite number"));
  EXPECT_THAT(rl_error("[run]\nthreads = 1.5\n"), HasSubstr("run.threads: expected an integer"));
  EXPECT_THAT(rl_error("[algo]\nuse_tis = 1\n"), HasSubstr("algo.use_tis: expected true or false"));
  EXPECT_THAT(rl_error("", {"--seed", "ten"}),
              HasSubstr("--seed: train.seed: expected an integer, got 'ten'"));
  EXPECT_THAT(rl_error("", {"--seed", "10x"}), HasSubstr("expected an integer"));
  EXPECT_THAT(rl_error("", {"--seed", "99999999999999999999"}), HasSubstr("expected an integer"));
  EXPECT_THAT(rl_error("", {"--lr", "nan"}), HasSubstr("expected a finite number"));
  EXPECT_THAT(rl_error("", {"--seed"}), HasSubstr("expected an integer after the flag"));
  EXPECT_THAT(rl_error("", {"stray"}), HasSubstr("stray: expected --set"));
  EXPECT_THAT(rl_error("", {"--set", "noequals"}), HasSubstr("expected --set table.key=value"));
  EXPECT_THAT(rl_error("[algo]\nkl_loss_type = \"k4\"\n"),
              HasSubstr("algo.kl_loss_type: expected one of k1, k2, k3, low_var_kl, got 'k4'"));
}

TEST(Config, FlagsWinAndLaterFlagsWinOverEarlier) {
  const auto loaded = load_rl(std::string(kSmallRl) + "[optimizer]\nlr = 1\n",
                              {"--lr", "2", "--set", "optimizer.lr=3"});
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  EXPECT_EQ(loaded->config.optimizer.lr, 3.0);
}

TEST(Config, BooleanFlagsAsMilesWritesThem) {
  const auto loaded =
      load_rl(kSmallRl, {"--use-tis", "--disable-grpo-std-normalization", "--rollout-shuffle",
                         "false", "--no-rewards-normalization", "--rollout-top-k", "-1"});
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  EXPECT_TRUE(loaded->config.algo.use_tis);
  EXPECT_FALSE(loaded->config.algo.grpo_std_normalization);
  EXPECT_FALSE(loaded->config.algo.rewards_normalization);
  EXPECT_FALSE(loaded->config.data.rollout_shuffle);
}

TEST(Config, AKeyInTwoTablesNeedsItsTable) {
  EXPECT_THAT(rl_error("", {"--load", "x"}),
              AllOf(HasSubstr("--set model.load="), HasSubstr("--set checkpoint.load=")));
}

TEST(Config, FilesThatCannotBeReadOrParsed) {
  EXPECT_THAT(load_config<RlConfig>({"/no/such/file.toml", {}}).message(),
              HasSubstr("/no/such/file.toml"));
  EXPECT_THAT(load_rl("[model\n").message(), HasSubstr("rl.toml:1"));
  EXPECT_THAT(load_rl("[run]\nname = 1\nname = 2\n").message(), HasSubstr("rl.toml:3"));
}

TEST(Config, AllProblemsAtOnce) {
  const std::string error =
      rl_error("[optimizer]\nlr = -1\nadam_beta1 = 2\n[lora]\nlora_rank = 8\n");
  EXPECT_THAT(error, AllOf(HasSubstr("3 problems"), HasSubstr("optimizer.lr"),
                           HasSubstr("optimizer.adam_beta1"), HasSubstr("LoRA is not supported")));
}

TEST(Config, SamplesPerRolloutEqualBatchTimesSteps) {
  const auto batch = [](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--rollout-batch-size", "32", "--n-samples-per-prompt", "8"});
    return load_config<RlConfig>(
        {write_file("b.toml",
                    "[model]\nload='b'\n[data]\nprompt_data='t'\n[rollout]\nnum_rollout=1\n"),
         std::move(flags)});
  };
  EXPECT_EQ(batch({"--global-batch-size", "64"})->config.train.num_steps_per_rollout, 4);
  EXPECT_EQ(batch({"--num-steps-per-rollout", "2"})->config.train.global_batch_size, 128);
  EXPECT_TRUE(batch({"--global-batch-size", "64", "--num-steps-per-rollout", "4"}).ok());
  EXPECT_THAT(batch({"--global-batch-size", "64", "--num-steps-per-rollout", "2"}).message(),
              AllOf(HasSubstr("= 256"), HasSubstr("= 128")));
  EXPECT_THAT(batch({"--global-batch-size", "60"}).message(), HasSubstr("does not divide"));
  EXPECT_THAT(batch({"--num-steps-per-rollout", "3"}).message(), HasSubstr("does not divide"));
  EXPECT_THAT(batch({"--global-batch-size", "0"}).message(), HasSubstr("expected > 0"));
  EXPECT_THAT(batch({}).message(), HasSubstr("give global_batch_size or num_steps_per_rollout"));
  EXPECT_THAT(batch({"--global-batch-size", "64", "--num-steps-per-rollout", "9223372036854775807"})
                  .message(),
              HasSubstr("leave one"));
}

TEST(Config, CombinationsThatMakeNoSense) {
  EXPECT_THAT(rl_error("", {"--kl-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.1"}),
              HasSubstr("cannot both be non-zero"));
  EXPECT_THAT(rl_error("", {"--kl-coef", "0.1"}), HasSubstr("only the reinforce_plus_plus"));
  EXPECT_THAT(rl_error("", {"--kl-loss-coef", "0.1"}), HasSubstr("has no effect without"));
  EXPECT_THAT(rl_error("", {"--use-tis", "--use-rollout-logprobs"}), HasSubstr("excludes"));
  EXPECT_THAT(rl_error("", {"--advantage-estimator", "reinforce_plus_plus"}),
              HasSubstr("normalize_advantages"));
  EXPECT_THAT(rl_error("", {"--eps-clip-c", "1"}), HasSubstr("eps_clip_c: expected > 1"));
  EXPECT_THAT(rl_error("", {"--rollout-temperature", "0"}), HasSubstr("rollout_temperature"));
  EXPECT_THAT(rl_error("", {"--rollout-top-p", "0.9"}), HasSubstr("full-support"));
  EXPECT_THAT(rl_error("", {"--num-epoch", "1"}), HasSubstr("exactly one of num_rollout"));
  EXPECT_THAT(rl_error("", {"--over-sampling-batch-size", "64"}), HasSubstr("no effect"));
  EXPECT_THAT(rl_error("", {"--over-sampling-batch-size", "16", "--dynamic-sampling-filter",
                            "check_reward_nonzero_std"}),
              HasSubstr("at least rollout_batch_size"));
  EXPECT_THAT(rl_error("", {"--init", "k3-nano"}), HasSubstr("exactly one of load"));
  EXPECT_THAT(rl_error("", {"--eval-interval", "5"}), HasSubstr("eval_prompt_data"));
  EXPECT_THAT(rl_error("", {"--gamma", "0.9"}), HasSubstr("only reinforce_plus_plus discounts"));
  for (const char* flag : {"--partial-rollout", "--recompute", "--apply-chat-template"}) {
    EXPECT_THAT(rl_error("", {flag}), HasSubstr("not supported yet")) << flag;
  }
  EXPECT_EQ(rl_error("", {}), "no error");
}

TEST(Config, SftSharesTablesAndHasItsOwnRules) {
  const auto load = [](const std::string& text) {
    return load_config<SftConfig>({write_file("sft.toml", text), {}});
  };
  const std::string good =
      "[model]\ninit='k3-nano'\n[data]\nprompt_data='t'\n[train]\ntrain_iters=10\n";
  EXPECT_TRUE(load(good).ok());
  EXPECT_THAT(load("[model]\ninit='k3-nano'\n").message(),
              AllOf(HasSubstr("data.prompt_data"), HasSubstr("train.train_iters")));
  EXPECT_THAT(load(good + "[algo]\neps_clip=0.2\n").message(), HasSubstr("unknown table [algo]"));
  EXPECT_THAT(load(good + "[optimizer]\nlr_warmup_iters=10\nlr_decay_iters=10\n").message(),
              HasSubstr("more than lr_warmup_iters"));
}

TEST(Config, ExamplesAreValid) {
  const std::string examples = std::string(TDM_SOURCE_DIR) + "/examples/";
  const auto sft = load_config<SftConfig>({examples + "demo_sft.toml", {}});
  EXPECT_TRUE(sft.ok()) << sft.message();
  const auto rl = load_config<RlConfig>({examples + "demo.toml", {}});
  EXPECT_TRUE(rl.ok()) << rl.message();
}

TEST(Config, HelpListsEveryField) {
  RlConfig config;
  const std::string help = describe_fields(fields_of(config));
  for (const Field& field : fields_of(config)) {
    EXPECT_THAT(help, HasSubstr("  " + std::string(field.key) + " ("));
  }
}

}  // namespace
}  // namespace tandem
