// engine_rig.h — what engine tests share: a fake model in an engine, requests, and what each must
// give, computed token by token without an engine, a cache or a batch.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/rng.h"
#include "engine/engine.h"
#include "rules_rig.h"
#include "support/backend_under_test.h"
#include "support/fake_model.h"

namespace tandem::test {

/// A model and an execution context to build engines on.
struct Rig {
  FakeModel model;
  ThreadPool pool{1};
  Arena arena = arena_under_test();
  ExecCtx ctx{&ops_under_test(), &pool, &arena, nullptr, &device_under_test()};

  [[nodiscard]] std::unique_ptr<Engine> engine(const EngineOptions& options) {
    return std::make_unique<Engine>(model, ctx, options);
  }
};

/// Small limits that still leave every mechanism something to do.
[[nodiscard]] inline EngineOptions small_options() {
  return {.max_batch_tokens = 16, .max_running_seqs = 6, .max_seq_len = 64, .page_size = 4};
}

[[nodiscard]] inline std::vector<RequestId> submit_all(Engine& engine,
                                                       const std::vector<Request>& requests) {
  std::vector<RequestId> ids;
  for (const Request& request : requests) {
    ids.push_back(engine.submit(request).value_or_throw());
  }
  return ids;
}

[[nodiscard]] inline std::vector<std::int32_t> random_tokens(std::int64_t count,
                                                             std::uint64_t key) {
  Rng rng(mix_key({key, 0x70C}));
  std::vector<std::int32_t> tokens(usize(count));
  for (std::int32_t& token : tokens) {
    token = static_cast<std::int32_t>(rng.below(FakeModel::kVocab));
  }
  return tokens;
}

[[nodiscard]] inline Request make_request(std::int64_t prompt_size, std::int64_t max_new_tokens,
                                          std::uint64_t sequence_id = 0) {
  Request request;
  request.prompt = random_tokens(prompt_size, mix_key({sequence_id, 1}));
  request.max_new_tokens = max_new_tokens;
  request.seed = 7;
  request.sequence_id = sequence_id;
  request.want_logprobs = true;
  request.want_routed_experts = true;
  return request;
}

/// A small engine whose prefixes may be resumed at every eighth token.
[[nodiscard]] inline EngineOptions cached_options() {
  EngineOptions options = small_options();
  options.max_seq_len = 96;
  options.checkpoint_tokens = 8;
  return options;
}

/// One that the prefix cache may serve: nobody wants the experts of every token.
[[nodiscard]] inline Request cacheable_request(std::vector<std::int32_t> prompt,
                                               std::int64_t max_new_tokens,
                                               std::uint64_t sequence_id = 0) {
  Request request = make_request(1, max_new_tokens, sequence_id);
  request.prompt = std::move(prompt);
  request.want_routed_experts = false;
  return request;
}

/// `prompt`, then `count` tokens that depend on `key`.
[[nodiscard]] inline std::vector<std::int32_t> longer(std::vector<std::int32_t> prompt,
                                                      std::int64_t count, std::uint64_t key) {
  const std::vector<std::int32_t> tail = random_tokens(count, mix_key({key, 2}));
  prompt.insert(prompt.end(), tail.begin(), tail.end());
  return prompt;
}

inline RequestOutput run_one(Engine& engine, const Request& request) {
  const RequestId id = engine.submit(request).value_or_throw();
  while (engine.has_work()) {
    engine.step();
    engine.check_integrity();
  }
  return engine.take_output(id).value_or_throw();
}

/// `count` requests with prompts of 1 to 17 and responses of 1 to 13 tokens, greedy and sampled.
[[nodiscard]] inline std::vector<Request> mixed_requests(std::int64_t count) {
  std::vector<Request> requests;
  for (std::int64_t i = 0; i < count; ++i) {
    requests.push_back(
        make_request(1 + (i * 5) % 17, 1 + (i * 7) % 13, static_cast<std::uint64_t>(i)));
    requests.back().sampling.temperature =
        i % 3 == 0 ? 0.0F : 0.5F + 0.25F * static_cast<float>(i % 4);
    if (i % 4 == 1) {
      requests.back().stop_ids = {3, 11};
    }
  }
  return requests;
}

/// What `request` must give with the model's present weights.
[[nodiscard]] inline RequestOutput expected_output(const Rig& rig, const Request& request,
                                                   const std::vector<std::int32_t>& eos_ids = {}) {
  const auto contains = [](const std::vector<std::int32_t>& ids, std::int32_t id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  RequestOutput output;
  std::vector<std::int32_t> tokens = request.prompt;
  expect_prompt_scores(rig.ctx, rig.model, request, output);
  std::unique_ptr<TokenConstraint> constraint;
  if (request.constraint != nullptr) {
    constraint = request.constraint->clone();
  }
  const auto* const fake = static_cast<const FakeConstraint*>(constraint.get());
  output.finish_reason = FinishReason::kLength;
  for (std::int64_t i = 0; i < request.max_new_tokens; ++i) {
    const std::vector<float> logits = rig.model.expected_logits(tokens);
    std::vector<float> changed = logits_under_rules(request, tokens, eos_ids, fake, logits);
    const F32Mat row(changed.data(), {1, FakeModel::kVocab});
    const std::array<SampleRow, 1> sample_row{
        SampleRow{request.sampling, mix_key({request.seed, request.sequence_id, tokens.size()})}};
    std::array<std::int32_t, 1> id{};
    ops::sample(rig.ctx, id, row, sample_row);
    if (id[0] < 0) {
      output.finish_reason = FinishReason::kError;
      break;
    }
    tokens.push_back(id[0]);
    output.tokens.push_back(id[0]);
    if (request.want_logprobs) {
      output.logprobs.push_back(
          expected_logprob(rig.ctx, logits, id[0], expected_temperature(request)));
    }
    if (request.num_top_logprobs > 0) {
      output.top_logprobs.push_back(expected_top(rig.ctx, logits, request));
    }
    if (contains(request.stop_ids, id[0]) || (!request.ignore_eos && contains(eos_ids, id[0]))) {
      output.finish_reason = FinishReason::kStop;
      break;
    }
    if (constraint != nullptr) {
      EXPECT_TRUE(constraint->accept(id[0]));
      if (constraint->is_complete()) {
        output.finish_reason = FinishReason::kStop;
        break;
      }
    }
  }
  if (request.want_routed_experts) {
    output.routed_experts = rig.model.expected_experts(std::span<const std::int32_t>(tokens).first(
        tokens.size() - (output.finish_reason == FinishReason::kError ? 0 : 1)));
  }
  return output;
}

/// Bitwise equality of everything that is a function of the request.
[[nodiscard]] inline ::testing::AssertionResult same_output(const RequestOutput& actual,
                                                            const RequestOutput& expected) {
  if (actual.tokens != expected.tokens) {
    return ::testing::AssertionFailure()
           << "tokens " << ::testing::PrintToString(actual.tokens) << " expected "
           << ::testing::PrintToString(expected.tokens);
  }
  if (actual.logprobs != expected.logprobs) {
    return ::testing::AssertionFailure()
           << "logprobs " << ::testing::PrintToString(actual.logprobs) << " expected "
           << ::testing::PrintToString(expected.logprobs);
  }
  if (!same_top(actual.top_logprobs, expected.top_logprobs)) {
    return ::testing::AssertionFailure() << "alternatives differ";
  }
  if (!same_logprobs(actual.prompt_logprobs, expected.prompt_logprobs)) {
    return ::testing::AssertionFailure()
           << "prompt logprobs " << ::testing::PrintToString(actual.prompt_logprobs) << " expected "
           << ::testing::PrintToString(expected.prompt_logprobs);
  }
  if (!same_top(actual.prompt_top_logprobs, expected.prompt_top_logprobs)) {
    return ::testing::AssertionFailure() << "alternatives of the prompt differ";
  }
  if (actual.finish_reason != expected.finish_reason) {
    return ::testing::AssertionFailure()
           << "finish reason " << finish_reason_name(actual.finish_reason) << " expected "
           << finish_reason_name(expected.finish_reason);
  }
  if (actual.routed_experts != expected.routed_experts) {
    return ::testing::AssertionFailure() << "routed experts differ";
  }
  return ::testing::AssertionSuccess();
}

/// Nothing queued and every page and slot free, or kept for later by the prefix cache.
inline void expect_idle_and_empty(const Engine& engine) {
  engine.check_integrity();
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.num_running, 0);
  EXPECT_EQ(stats.num_waiting, 0);
  EXPECT_EQ(stats.num_free_pages + stats.num_cached_pages, engine.memory_plan().num_pages);
  EXPECT_EQ(stats.num_free_slots, engine.memory_plan().num_slots);
}

/// Submits all, steps until idle with an integrity check after each step, compares all.
inline void expect_all_as_alone(Rig& rig, Engine& engine, const std::vector<Request>& requests) {
  std::vector<RequestId> ids;
  for (const Request& request : requests) {
    Expected<RequestId> id = engine.submit(request);
    ASSERT_TRUE(id.ok()) << id.message();
    ids.push_back(*id);
  }
  while (engine.has_work()) {
    engine.step();
    engine.check_integrity();
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Expected<RequestOutput> output = engine.take_output(ids[i]);
    ASSERT_TRUE(output.ok()) << output.message();
    EXPECT_TRUE(same_output(*output, expected_output(rig, requests[i]))) << "request " << i;
  }
  expect_idle_and_empty(engine);
}

}  // namespace tandem::test
