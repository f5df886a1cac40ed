// The RL step on a small model with random weights: log-probabilities equal on both sides under
// every algorithm, routing replay changes nothing, and a step is the same bits every time.
#include "rl/trainer.h"

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>

#include "models/kimi_k3/init.h"
#include "rl/word_problems.h"
#include "support/op_test.h"
#include "support/temp_dir.h"
#include "train/run_folder.h"

namespace tandem::test {
namespace {

/// A k3-nano with the demo's tokenizer and 16 problems.
class Bench {
 public:
  Bench() {
    write_demo_data(dir_.path(),
                    {.num_train = 16, .num_test = 8, .demonstrations = {.num_batches = 1}});
    std::filesystem::copy_file(dir_.path() + "/tokenizer.json",
                               dir_.path() + "/char_tokenizer.json");
    const auto tokenizer = load_tokenizer(dir_.path()).value_or_throw();
    auto preset = *kimi_k3::find_preset("k3-nano");
    preset.config.vocab_size = tokenizer->vocab_size();
    kimi_k3::write_initial_checkpoint(preset, {.seed = 3}, dir_.path());
  }

  /// Runs `steps` steps from the initial weights; returns them and leaves the final weights in
  /// `weights`.
  std::vector<RlStep> run(RlConfig config, int steps, std::vector<float>* weights = nullptr) {
    config.model.load = dir_.path();
    config.data.prompt_data = dir_.path() + "/train.jsonl";
    config.data.input_key = "question";
    config.data.label_key = "answer";
    config.rollout.rollout_batch_size = 4;
    config.rollout.n_samples_per_prompt = 4;
    config.rollout.rollout_max_response_len = 12;
    config.rollout.num_rollout = 4;
    config.rollout.rm_type = "gsm8k";
    config.optimizer.lr = 1e-3;
    if (!config.train.num_steps_per_rollout) {
      config.train.num_steps_per_rollout = 2;
    }
    config.derive();
    const auto problems = config.validate();
    EXPECT_TRUE(problems.empty()) << (problems.empty() ? "" : problems.front());
    LoadedModel loaded = load_trainable(*context_, dir_.path()).value_or_throw();
    std::unique_ptr<Model> reference;
    if (config.algo.kl_loss_coef != 0 || config.algo.kl_coef != 0) {
      reference = load_frozen(*context_, dir_.path()).value_or_throw();
    }
    const auto train =
        load_problems(dir_.path() + "/train.jsonl", {"question", "answer"}, *loaded.tokenizer)
            .value_or_throw();
    RlTrainer trainer(*context_, *loaded.model, reference.get(), *loaded.tokenizer, config, train,
                      {});
    std::vector<RlStep> out;
    for (int i = 0; i < steps; ++i) {
      out.push_back(trainer.step());
    }
    if (weights != nullptr) {
      for (const nn::Parameter& parameter : loaded.model->parameters().all()) {
        weights->insert(weights->end(), parameter.value().begin(), parameter.value().end());
      }
    }
    return out;
  }

 private:
  TempDir dir_;
  TestContext context_;
};

RlConfig with(const std::function<void(RlConfig&)>& change) {
  RlConfig config;
  change(config);
  return config;
}

/// Every sample of an untrained model is wrong, so a group has no spread; an entropy bonus makes
/// each step train all the same.
void train_on_entropy(RlConfig& config) {
  config.algo.entropy_coef = 0.01;
}

struct Variant {
  const char* name;
  std::function<void(RlConfig&)> change;
};

const std::vector<Variant>& variants() {
  static const std::vector<Variant> all{
      {"grpo", [](RlConfig&) {}},
      {"dr_grpo",
       [](RlConfig& c) {
         c.algo.grpo_std_normalization = false, c.algo.loss_aggregation = "constant";
       }},
      {"dapo",
       [](RlConfig& c) { c.algo.eps_clip_high = 0.28, c.algo.loss_aggregation = "token-mean"; }},
      {"gspo", [](RlConfig& c) { c.algo.advantage_estimator = "gspo", c.algo.eps_clip = 4e-4; }},
      {"cispo", [](RlConfig& c) { c.algo.advantage_estimator = "cispo"; }},
      {"rloo", [](RlConfig& c) { c.algo.advantage_estimator = "rloo"; }},
      {"reinforce++",
       [](RlConfig& c) {
         c.algo.advantage_estimator = "reinforce_plus_plus", c.algo.normalize_advantages = true,
         c.algo.kl_coef = 0.1;
       }},
      {"kl loss", [](RlConfig& c) { c.algo.use_kl_loss = true, c.algo.kl_loss_coef = 0.01; }},
      {"tis", [](RlConfig& c) { c.algo.use_tis = true; }},
      {"one step", [](RlConfig& c) { c.train.num_steps_per_rollout = 1; }},
      {"temperature", [](RlConfig& c) { c.rollout.rollout_temperature = 0.7; }},
      {"muon", [](RlConfig& c) { c.optimizer.optimizer = "muon"; }},
      {"small micro-batches", [](RlConfig& c) { c.train.max_tokens_per_microbatch = 64; }},
  };
  return all;
}

TEST(RlTrainer, TrainerAndSamplerAgreeToTheBitUnderEveryOption) {
  Bench bench;
  for (const Variant& variant : variants()) {
    const auto steps =
        bench.run(with([&](RlConfig& c) { train_on_entropy(c), variant.change(c); }), 2);
    for (const RlStep& step : steps) {
      EXPECT_EQ(step.metrics.logprob_mismatch_max, 0.0)
          << variant.name << " step " << step.metrics.step;
      EXPECT_EQ(step.metrics.train_rollout_kl, 0.0) << variant.name;
      EXPECT_GT(*step.metrics.grad_norm, 0.0)
          << variant.name;  // the step trained, so the next one compares changed weights
    }
  }
}

TEST(RlTrainer, StepsRepeatBitForBit) {
  Bench bench;
  std::vector<float> first;
  std::vector<float> second;
  bench.run(with(train_on_entropy), 2, &first);
  bench.run(with(train_on_entropy), 2, &second);
  ASSERT_EQ(first.size(), second.size());
  EXPECT_TRUE(same_bits(first.data(), second.data(), isize(first)));
}

TEST(RlTrainer, RoutingReplayIsOnlyACheck) {
  Bench bench;
  std::vector<float> plain;
  std::vector<float> replayed;
  const auto steps = bench.run(with([](RlConfig& c) {
                                 train_on_entropy(c), c.algo.use_rollout_routing_replay = true,
                                                      c.train.num_steps_per_rollout = 1;
                               }),
                               1, &replayed);
  EXPECT_EQ(steps[0].metrics.logprob_mismatch_max, 0.0);
  bench.run(with([](RlConfig& c) { train_on_entropy(c), c.train.num_steps_per_rollout = 1; }), 1,
            &plain);
  EXPECT_TRUE(same_bits(plain.data(), replayed.data(), isize(plain)));
}

TEST(RlTrainer, DynamicSamplingGivesUpWithAMessageWhenNoGroupHasSpread) {
  Bench bench;
  try {
    bench.run(
        with([](RlConfig& c) { c.rollout.dynamic_sampling_filter = "check_reward_nonzero_std"; }),
        1);
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("reward spread"), std::string::npos) << error.what();
  }
}

// The comparison itself must be able to fail: one ulp in one token of one sample shows, and so does
// a NaN.
TEST(RlTrainer, OneUlpOfMismatchShows) {
  Bench bench;
  const auto steps = bench.run(with(train_on_entropy), 1);
  std::vector<Sample> samples = steps[0].samples;
  std::vector<std::vector<float>> old;
  for (const Sample& sample : samples) {
    old.push_back(sample.rollout_logprobs);
  }
  EXPECT_EQ(compare_logprobs(samples, old).max_abs, 0.0);
  old[5][1] = std::nextafter(old[5][1], 0.0F);
  const LogprobMismatch mismatch = compare_logprobs(samples, old);
  EXPECT_GT(mismatch.max_abs, 0.0);
  EXPECT_LT(mismatch.max_abs, 1e-6);
  old[5][1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(compare_logprobs(samples, old).max_abs, std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace tandem::test
