// kimi_k3_generation_test.cpp — the engine with the real model, kernels and all: what the fake
// model proves of the bookkeeping holds for the arithmetic too, and the trainer computes the same
// bits.
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "engine/engine.h"
#include "models/kimi_k3/init.h"
#include "models/registry.h"
#include "ops/loss.h"
#include "support/backend_under_test.h"

namespace tandem::test {
namespace {

class KimiK3Generation : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    kimi_k3::write_initial_checkpoint(kimi_k3::find_preset("k3-nano").value(), {}, dir());
  }
  static void TearDownTestSuite() { std::filesystem::remove_all(dir()); }
  /// gtest_discover_tests runs each test in its own process: one folder a process.
  static std::string dir() {
    return ::testing::TempDir() + fmt::format("engine_k3_nano_{}", ::getpid());
  }

  /// Six prompts of 3 to 58 tokens, three samples each; sample j has sequence_id + j.
  [[nodiscard]] std::vector<Request> prompts() const {
    std::vector<Request> requests;
    for (std::int32_t i = 0; i < 6; ++i) {
      Request request;
      for (std::int32_t t = 0; t < 3 + 11 * i; ++t) {
        request.prompt.push_back((t * 7 + i) % static_cast<std::int32_t>(model_->vocab_size()));
      }
      request.sampling.temperature = i == 5 ? 0.0F : 0.6F + 0.2F * static_cast<float>(i);
      request.max_new_tokens = 24;
      request.seed = 3;
      request.sequence_id = static_cast<std::uint64_t>(100 * i);
      request.want_logprobs = true;
      request.want_routed_experts = true;
      requests.push_back(request);
    }
    return requests;
  }

  struct Schedule {
    bool grouped = false;
    bool one_by_one = false;
    std::int64_t preempt_every = 0;  // steps; 0: never
  };
  std::vector<RequestOutput> run(const EngineOptions& options, Schedule schedule) {
    Engine engine(*model_, ctx_, options);
    std::vector<RequestId> ids;
    for (Request& request : prompts()) {
      if (schedule.grouped) {
        for (const RequestId id : engine.submit_group(request, 3).value_or_throw()) {
          ids.push_back(id);
        }
        continue;
      }
      for (int j = 0; j < 3; ++j, ++request.sequence_id) {
        ids.push_back(engine.submit(request).value_or_throw());
        if (schedule.one_by_one) {
          engine.run_until_idle();
        }
      }
    }
    for (std::int64_t step = 1; engine.has_work(); ++step) {
      engine.step();
      if (schedule.preempt_every > 0 && step % schedule.preempt_every == 0) {
        engine.preempt_all();
      }
    }
    engine.check_integrity();
    std::vector<RequestOutput> outputs;
    for (const RequestId id : ids) {
      outputs.push_back(engine.take_output(id).value_or_throw());
    }
    return outputs;
  }

  ThreadPool pool_{2};
  Arena arena_ = test::arena_under_test();
  ExecCtx ctx_{&test::ops_under_test(), &pool_, &arena_, nullptr, &test::device_under_test()};
  std::unique_ptr<Model> model_ = load_model(ctx_, dir(), {.trainable = true}).value_or_throw();
};

class KimiK3CacheFormats : public KimiK3Generation,
                           public ::testing::WithParamInterface<LatentFormat> {};
INSTANTIATE_TEST_SUITE_P(All, KimiK3CacheFormats,
                         ::testing::Values(LatentFormat::kF32, LatentFormat::kBF16,
                                           LatentFormat::kFp8),
                         [](const auto& of) { return std::string(latent_format_name(of.param)); });

TEST_P(KimiK3CacheFormats, SameBitsAloneAndInAnySchedule) {
  model_ = load_model(ctx_, dir(), {}).value_or_throw();
  const EngineOptions roomy{.max_seq_len = 128, .kv_cache_dtype = GetParam()};
  EngineOptions chunked = roomy;
  chunked.max_batch_tokens = 5;
  chunked.page_size = 3;
  EngineOptions short_of_pages = roomy;
  short_of_pages.max_batch_tokens = 100;
  short_of_pages.page_size = 1;
  short_of_pages.num_pages = 300;
  const std::vector<RequestOutput> alone = run(roomy, {.one_by_one = true});
  const std::vector<std::vector<RequestOutput>> others{
      run(roomy, {}), run(roomy, {.grouped = true}), run(chunked, {.grouped = true}),
      run(short_of_pages, {}), run(roomy, {.grouped = true, .preempt_every = 6})};
  for (std::size_t schedule = 0; schedule < others.size(); ++schedule) {
    for (std::size_t i = 0; i < alone.size(); ++i) {
      SCOPED_TRACE(fmt::format("schedule {} request {}", schedule, i));
      EXPECT_EQ(others[schedule][i].tokens, alone[i].tokens);
      EXPECT_EQ(others[schedule][i].logprobs, alone[i].logprobs);
      EXPECT_EQ(others[schedule][i].routed_experts, alone[i].routed_experts);
    }
  }
}

TEST_F(KimiK3Generation, SameBitsFromThePrefixCache) {
  model_ = load_model(ctx_, dir(), {}).value_or_throw();
  EngineOptions options{.max_seq_len = 128};
  options.page_size = 4;
  options.checkpoint_tokens = 16;
  std::vector<Request> requests;
  for (Request& request : prompts()) {
    request.want_routed_experts = false;
    requests.push_back(request);
    request.prompt.resize(request.prompt.size() / 2 + 1, 1);
    request.prompt.push_back(5);  // leaves the other in the middle
    requests.push_back(request);
  }
  EngineOptions off = options;
  off.prefix_cache = false;
  EngineOptions chunked = options;
  chunked.max_batch_tokens = 9;
  chunked.max_running_seqs = 3;
  chunked.preempt_every = 5;
  chunked.num_pages = 70;
  const auto outputs = [&](const EngineOptions& with, int rounds, std::int64_t* hits) {
    Engine engine(*model_, ctx_, with);
    std::vector<RequestOutput> all;
    for (int round = 0; round < rounds; ++round) {
      std::vector<RequestId> ids;
      for (const Request& request : requests) {
        ids.push_back(engine.submit(request).value_or_throw());
      }
      engine.run_until_idle();
      engine.check_integrity();
      for (const RequestId id : ids) {
        all.push_back(engine.take_output(id).value_or_throw());
      }
    }
    *hits = engine.stats().prefix.num_hits;
    return all;
  };
  std::int64_t hits = 0;
  const std::vector<RequestOutput> cold = outputs(off, 1, &hits);
  EXPECT_EQ(hits, 0);
  for (const EngineOptions& with : {options, chunked}) {
    const std::vector<RequestOutput> warm = outputs(with, 2, &hits);
    EXPECT_GT(hits, 5);
    for (std::size_t i = 0; i < warm.size(); ++i) {
      const RequestOutput& expected = cold[i % cold.size()];
      EXPECT_EQ(warm[i].tokens, expected.tokens) << "request " << i;
      EXPECT_EQ(warm[i].logprobs, expected.logprobs) << "request " << i;
    }
  }
}

TEST_F(KimiK3Generation, EveryCacheFormatIsUsed) {
  model_ = load_model(ctx_, dir(), {}).value_or_throw();
  const auto outputs = [&](std::optional<LatentFormat> format) {
    return run({.max_seq_len = 128, .kv_cache_dtype = format}, {});
  };
  const auto exact = outputs(LatentFormat::kF32);
  const auto halves = outputs(LatentFormat::kBF16);
  const auto bytes = outputs(LatentFormat::kFp8);
  EXPECT_EQ(outputs({})[0].logprobs, exact[0].logprobs);  // k3-nano has fp32 matrices
  for (std::size_t i = 0; i < exact.size(); ++i) {
    EXPECT_NE(halves[i].logprobs, exact[i].logprobs) << i;
    EXPECT_NE(bytes[i].logprobs, halves[i].logprobs) << i;
  }
  // The first greedy token's log-probability is of the prompt alone, hence comparable.
  EXPECT_NEAR(halves.back().logprobs[0], exact.back().logprobs[0], 0.01);
  EXPECT_NEAR(bytes.back().logprobs[0], exact.back().logprobs[0], 0.1);
}

TEST_F(KimiK3Generation, ATrainableModelTakesFp32RowsOnly) {
  EXPECT_TRUE(plan_memory(*model_, {.kv_cache_dtype = LatentFormat::kF32}).ok());
  EXPECT_EQ(plan_memory(*model_, {}).value_or_throw().latent_format, LatentFormat::kF32);
  const auto plan = plan_memory(*model_, {.kv_cache_dtype = LatentFormat::kFp8});
  ASSERT_FALSE(plan.ok());
  EXPECT_THAT(plan.message(), ::testing::HasSubstr("kv_cache_dtype is fp8: expected fp32"));
}

TEST_F(KimiK3Generation, TheTrainersForwardGivesTheSamplersLogProbsAndExperts) {
  const std::vector<RequestOutput> outputs = run({.max_seq_len = 128}, {.grouped = true});
  const std::vector<Request> requests = prompts();
  // All sequences packed into one training batch, without their last token, which was never fed.
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;
  std::vector<float> temperatures;
  std::vector<std::int32_t> experts;
  std::vector<std::int32_t> cu_seqlens{0};
  std::vector<float> expected;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Request& request = requests[i / 3];
    std::vector<std::int32_t> sequence = request.prompt;
    sequence.insert(sequence.end(), outputs[i].tokens.begin(), outputs[i].tokens.end());
    for (std::size_t t = 0; t + 1 < sequence.size(); ++t) {
      const bool response = t + 1 >= request.prompt.size();
      tokens.push_back(sequence[t]);
      targets.push_back(response ? sequence[t + 1] : -1);
      const float temperature = request.sampling.temperature;
      temperatures.push_back(temperature == 0.0F ? 1.0F : temperature);
      expected.push_back(response ? outputs[i].logprobs[t + 1 - request.prompt.size()] : 0.0F);
    }
    experts.insert(experts.end(), outputs[i].routed_experts.begin(),
                   outputs[i].routed_experts.end());
    cu_seqlens.push_back(checked_cast<std::int32_t>(tokens.size()));
  }
  const std::int64_t rows = isize(tokens);
  const std::int64_t width = model_->moe_layers() * model_->experts_per_token();
  ASSERT_EQ(isize(experts), rows * width);
  std::vector<std::int32_t> trained_experts(experts.size(), -1);
  RoutedExperts routed{.ids = {trained_experts.data(), {rows, width}}};
  const TrainBatch batch{.token_ids = {tokens.data(), {rows}},
                         .cu_seqlens = {cu_seqlens.data(), {isize(cu_seqlens)}},
                         .routed = &routed};
  Arena keep = arena_under_test();
  const ConstF32Mat hidden = model_->forward_train(ctx_, batch, keep);
  std::vector<float> logits(usize(rows * model_->vocab_size()));
  const F32Mat logits_view(logits.data(), {rows, model_->vocab_size()});
  model_->head(ctx_, logits_view, hidden);
  std::vector<float> logprobs(usize(rows));
  ops::log_prob(ctx_, {logprobs.data(), {rows}}, {}, logits_view, {targets.data(), {rows}},
                {temperatures.data(), {rows}});
  EXPECT_EQ(logprobs, expected);
  EXPECT_EQ(trained_experts, experts);
}

TEST_F(KimiK3Generation, ScoringAResponseGivesWhatItsSamplingReported) {
  const std::vector<RequestOutput> outputs = run({.max_seq_len = 128}, {});
  const std::vector<Request> requests = prompts();
  Engine engine(*model_, ctx_, {.max_batch_tokens = 11, .max_running_seqs = 7, .max_seq_len = 128});
  std::vector<RequestId> ids;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    Request scoring = requests[i / 3];
    scoring.prompt_logprobs_from = isize(scoring.prompt);
    scoring.prompt.insert(scoring.prompt.end(), outputs[i].tokens.begin(), outputs[i].tokens.end());
    scoring.max_new_tokens = 0;
    ids.push_back(engine.submit(scoring).value_or_throw());
  }
  engine.run_until_idle();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const RequestOutput scores = engine.take_output(ids[i]).value_or_throw();
    EXPECT_EQ(scores.prompt_logprobs, outputs[i].logprobs) << i;
    EXPECT_EQ(scores.routed_experts, outputs[i].routed_experts) << i;
  }
}

}  // namespace
}  // namespace tandem::test
