// rules_test.cpp — logit rules, constraints and alternatives of requests: each as computed from the
// plain tokens, among requests without any, in groups, under preemption and on a device.
#include <gmock/gmock.h>

#include "engine_rig.h"
#include "support/fake_device.h"

namespace tandem::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::shared_ptr<FakeConstraint> constrained(std::uint64_t seed,
                                            FakeConstraint::Options options = {}) {
  return std::make_shared<FakeConstraint>(seed, options);
}

/// `count` requests in which every rule and report occurs alone, with others and not at all.
std::vector<Request> requests_with_rules(std::int64_t count) {
  std::vector<Request> requests = mixed_requests(count);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Request& request = requests[i];
    Rng rng(mix_key({i, 0x7D1E5}));
    LogitRules& rules = request.rules;
    if (i % 3 == 0) {
      continue;
    }
    rules.repetition_penalty = rng.below(2) == 0 ? 1.0F : 1.5F;
    rules.frequency_penalty = rng.below(2) == 0 ? 0.0F : 0.75F;
    rules.presence_penalty = rng.below(2) == 0 ? 0.0F : -0.5F;
    if (rng.below(2) == 0) {
      rules.logit_bias = {{5, 3.5F}, {static_cast<std::int32_t>(rng.below(5)), -100.0F}, {36, 2}};
    }
    if (rng.below(2) == 0) {
      request.stop_ids = {3, 11, 5};
      rules.min_new_tokens = request.max_new_tokens / 2;
    }
    if (rng.below(2) == 0) {
      request.constraint = constrained(i, {.active_from = static_cast<std::int64_t>(rng.below(4))});
    }
    request.num_top_logprobs = rng.below(2) == 0 ? 0 : static_cast<std::int64_t>(rng.below(21));
    request.logprob_mode = rng.below(2) == 0 ? LogprobMode::kScaled : LogprobMode::kRaw;
  }
  return requests;
}

void expect_all_with_rules(Rig& rig, Engine& engine, const std::vector<Request>& requests,
                           std::int64_t preempt_every = 0) {
  std::vector<RequestId> ids;
  for (const Request& request : requests) {
    ids.push_back(engine.submit(own_copy(request)).value_or_throw());
  }
  for (std::int64_t step = 1; engine.has_work(); ++step) {
    engine.step();
    engine.check_integrity();
    if (preempt_every > 0 && step % preempt_every == 0) {
      engine.preempt_all();
    }
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const RequestOutput output = engine.take_output(ids[i]).value_or_throw();
    EXPECT_TRUE(same_output(output, expected_output(rig, requests[i], engine.options().eos_ids)))
        << "request " << i;
  }
  expect_idle_and_empty(engine);
}

RequestOutput run_one(Engine& engine, const Request& request) {
  const RequestId id = engine.submit(own_copy(request)).value_or_throw();
  engine.run_until_idle();
  return engine.take_output(id).value_or_throw();
}

TEST(Rules, EachRequestAsAloneInAnyBatch) {
  for (const std::int64_t budget : {1, 5, 64}) {
    Rig rig;
    EngineOptions options = small_options();
    options.max_batch_tokens = budget;
    options.eos_ids = {20, 30};
    const auto engine = rig.engine(options);
    expect_all_with_rules(rig, *engine, requests_with_rules(24));
  }
}

TEST(Rules, PreemptionChangesNothing) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_batch_tokens = 40;
  const auto engine = rig.engine(options);
  expect_all_with_rules(rig, *engine, requests_with_rules(18), 3);
  EXPECT_GT(engine->stats().num_preemptions, 5);
}

TEST(Rules, OnADeviceToo) {
  FakeDevice device;
  Rig rig;
  rig.ctx.device = &device;
  const auto engine = rig.engine(small_options());
  const std::int64_t allocations = device.counters().allocations;
  expect_all_with_rules(rig, *engine, requests_with_rules(24));
  expect_all_with_rules(rig, *engine, requests_with_rules(24), 3);
  EXPECT_EQ(device.counters().allocations, allocations);
  EXPECT_EQ(device.memory()->allocated,
            engine->memory_plan().total_bytes() - engine->memory_plan().weight_bytes);
}

/// What a device was asked for by one decode of `request` beside a plain one.
DeviceCounters counters_of_a_decode(const Request& request) {
  FakeDevice device;
  Rig rig;
  rig.ctx.device = &device;
  const auto engine = rig.engine(small_options());
  Request plain = make_request(5, 20, 1);
  plain.want_routed_experts = false;
  EXPECT_TRUE(engine->submit(plain).ok());
  EXPECT_TRUE(engine->submit(request).ok());
  for (int i = 0; i < 5; ++i) {  // prompts, then steps that are run and recorded
    engine->step();
  }
  const DeviceCounters before = device.counters();
  engine->step();
  const DeviceCounters after = device.counters();
  return {.uploads = after.uploads - before.uploads,
          .downloads = after.downloads - before.downloads,
          .launches = after.launches - before.launches,
          .recorded_launches = after.recorded_launches - before.recorded_launches};
}

TEST(Rules, OnlyStepsWithRulesPayForThem) {
  Request request = make_request(5, 20, 2);
  request.want_routed_experts = false;
  const DeviceCounters plain = counters_of_a_decode(request);
  EXPECT_EQ(plain.recorded_launches, 1);
  EXPECT_EQ(plain.launches, 0);
  EXPECT_EQ(plain.uploads, 2);
  EXPECT_EQ(plain.downloads, 1);
  Request with_rules = request;
  with_rules.rules.presence_penalty = 0.5F;
  const DeviceCounters rules = counters_of_a_decode(with_rules);
  EXPECT_EQ(rules.recorded_launches, 1);  // the model's part is launched as it was recorded
  EXPECT_EQ(rules.launches, 1);           // the copy (the fake does not see ops)
  EXPECT_EQ(rules.uploads, 3);
  EXPECT_EQ(rules.downloads, 1);
  Request with_top = request;
  with_top.num_top_logprobs = 2;
  const DeviceCounters top = counters_of_a_decode(with_top);
  EXPECT_EQ(top.recorded_launches, 1);
  EXPECT_EQ(top.downloads, 2);
}

TEST(Rules, GroupsForkEachWithItsOwnCountsAndConstraint) {
  for (const std::int64_t budget : {4, 32}) {
    Rig rig;
    EngineOptions options = small_options();
    options.max_batch_tokens = budget;
    const auto engine = rig.engine(options);
    Request request = make_request(9, 12, 60);
    request.rules = {.repetition_penalty = 1.3F, .frequency_penalty = 0.5F, .min_new_tokens = 3};
    request.stop_ids = {1, 2, 3, 4};
    request.constraint = constrained(4, {.active_from = 2});
    request.num_top_logprobs = 3;
    request.prompt_logprobs_from = 2;
    const auto ids = engine->submit_group(request, 5).value_or_throw();
    engine->run_until_idle();
    EXPECT_GT(engine->stats().num_forks, 2);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      Request one = request;
      one.sequence_id += i;
      EXPECT_TRUE(
          same_output(engine->take_output(ids[i]).value_or_throw(), expected_output(rig, one)))
          << i;
    }
  }
}

TEST(Rules, PenaltiesAndBiasesMoveTheDraws) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  Request request = make_request(5, 30, 3);
  request.sampling.temperature = 0.0F;
  const std::vector<std::int32_t> free_run = run_one(*engine, request).tokens;
  request.rules.logit_bias = {{7, 100.0F}};
  EXPECT_EQ(run_one(*engine, request).tokens, std::vector<std::int32_t>(30, 7));
  request.rules = {.repetition_penalty = 2.0F, .frequency_penalty = 2.0F, .presence_penalty = 2.0F};
  std::vector<std::int32_t> varied = run_one(*engine, request).tokens;
  EXPECT_NE(varied, free_run);
  const auto distinct = [](std::vector<std::int32_t> ids) {
    std::ranges::sort(ids);
    return std::unique(ids.begin(), ids.end()) - ids.begin();
  };
  EXPECT_GT(distinct(varied), distinct(free_run));
}

TEST(Rules, ReportedLogprobsAreTheModelsOwn) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  Request request = make_request(5, 1, 3);
  request.sampling.temperature = 0.5F;
  request.rules.logit_bias = {{7, 100.0F}};
  for (const LogprobMode mode : {LogprobMode::kScaled, LogprobMode::kRaw}) {
    request.logprob_mode = mode;
    const RequestOutput output = run_one(*engine, request);
    ASSERT_EQ(output.tokens, std::vector<std::int32_t>{7});
    const std::vector<float> logits = rig.model.expected_logits(request.prompt);
    EXPECT_EQ(output.logprobs[0],
              expected_logprob(rig.ctx, logits, 7, mode == LogprobMode::kRaw ? 1.0F : 0.5F));
  }
}

TEST(Rules, NoStopBeforeTheLeastLength) {
  Rig rig;
  EngineOptions options = small_options();
  options.eos_ids = {9};
  const auto engine = rig.engine(options);
  Request request = make_request(5, 20, 1);
  request.stop_ids = {12};
  // Every draw would be a stop.
  request.rules.logit_bias = {{9, 90.0F}, {12, 100.0F}};
  EXPECT_EQ(run_one(*engine, request).tokens, std::vector<std::int32_t>{12});
  request.rules.min_new_tokens = 6;
  RequestOutput output = run_one(*engine, request);
  ASSERT_EQ(output.tokens.size(), 7U);
  EXPECT_EQ(output.tokens.back(), 12);
  EXPECT_EQ(std::ranges::count(output.tokens, 9), 0);
  request.ignore_eos = true;  // then it is no stop
  output = run_one(*engine, request);
  ASSERT_EQ(output.tokens.size(), 7U);
  EXPECT_EQ(std::ranges::count(output.tokens, 9), 6);
}

TEST(Constraint, EndsTheResponseWhenItIsComplete) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  for (const std::int64_t length : {1, 5}) {
    Request request = make_request(5, 5, 1);
    request.constraint = constrained(1, {.complete_at = length});
    const RequestOutput output = run_one(*engine, request);
    EXPECT_EQ(isize(output.tokens), length);
    EXPECT_EQ(output.finish_reason, FinishReason::kStop);  // on the last allowed token too
  }
}

TEST(Constraint, ADeadEndFailsItsRequestOnly) {
  FakeDevice device;
  for (const bool on_device : {false, true}) {
    Rig rig;
    rig.ctx.device = on_device ? &device : rig.ctx.device;
    const auto engine = rig.engine(small_options());
    Request dead = make_request(5, 12, 1);
    dead.constraint = constrained(1, {.dead_at = 3});
    Request refused = make_request(5, 12, 1);
    refused.constraint = constrained(1, {.refuses_at = 2});
    Request other = make_request(6, 12, 2);
    other.constraint = constrained(2);
    const RequestId dead_id = engine->submit(own_copy(dead)).value_or_throw();
    const RequestId refused_id = engine->submit(own_copy(refused)).value_or_throw();
    const RequestId other_id = engine->submit(own_copy(other)).value_or_throw();
    engine->run_until_idle();
    RequestOutput output = engine->take_output(dead_id).value_or_throw();
    EXPECT_EQ(output.finish_reason, FinishReason::kError);
    EXPECT_EQ(output.error, "the grammar allows no token at position 8");
    EXPECT_EQ(output.tokens.size(), 3U);
    output = engine->take_output(refused_id).value_or_throw();
    EXPECT_EQ(output.finish_reason, FinishReason::kError);
    EXPECT_THAT(output.error, HasSubstr("the grammar refuses token"));
    EXPECT_TRUE(
        same_output(engine->take_output(other_id).value_or_throw(), expected_output(rig, other)));
    expect_idle_and_empty(*engine);
  }
}

TEST(Constraint, NonFiniteLogitsUnderAMaskAreStillAnError) {
  Rig rig;
  rig.model.nan_after_token = 8;
  const auto engine = rig.engine(small_options());
  Request request = make_request(5, 12, 1);
  request.prompt.back() = 8;
  request.constraint = constrained(1);
  const RequestOutput output = run_one(*engine, request);
  EXPECT_EQ(output.finish_reason, FinishReason::kError);
  EXPECT_EQ(output.error, "the model's logits at position 5 are not finite");
}

TEST(Alternatives, EventsHaveThemToo) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  std::vector<RequestId> ids;
  std::vector<Request> requests;
  for (std::uint64_t i = 0; i < 5; ++i) {
    requests.push_back(make_request(5, 6, i));
    requests.back().num_top_logprobs = static_cast<std::int64_t>(i * 5);
    ids.push_back(engine->submit(requests.back()).value_or_throw());
  }
  std::vector<std::vector<std::vector<TokenLogprob>>> streamed(5);
  while (engine->has_work()) {
    for (const StepEvent& event : engine->step()) {
      const auto at = std::ranges::find(ids, event.id) - ids.begin();
      streamed[usize(at)].emplace_back(event.top_logprobs.begin(), event.top_logprobs.end());
    }
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const RequestOutput output = engine->take_output(ids[i]).value_or_throw();
    EXPECT_TRUE(same_output(output, expected_output(rig, requests[i])));
    if (i == 0) {
      EXPECT_TRUE(output.top_logprobs.empty());
    } else {
      EXPECT_TRUE(same_top(streamed[i], output.top_logprobs));
      EXPECT_EQ(output.top_logprobs[0].size(), i * 5);
    }
  }
}

TEST(Rules, RefusalsNameTheField) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto refusal = [&](const auto& change) {
    Request request = make_request(4, 4);
    change(request);
    const auto id = engine->submit(request);
    EXPECT_EQ(id.message(), engine->submit_group(request, 2).message());
    return id.message();
  };
  for (const float bad : {0.0F, -1.0F, 2.1F, nan}) {
    EXPECT_THAT(refusal([&](Request& r) { r.rules.repetition_penalty = bad; }),
                AllOf(HasSubstr("repetition_penalty is"), HasSubstr("(0, 2]")));
  }
  for (const float bad : {-2.1F, 2.1F, nan}) {
    EXPECT_THAT(refusal([&](Request& r) { r.rules.frequency_penalty = bad; }),
                AllOf(HasSubstr("frequency_penalty is"), HasSubstr("[-2, 2]")));
    EXPECT_THAT(refusal([&](Request& r) { r.rules.presence_penalty = bad; }),
                AllOf(HasSubstr("presence_penalty is"), HasSubstr("[-2, 2]")));
  }
  for (const float bad : {-101.0F, 100.5F, nan}) {
    EXPECT_THAT(refusal([&](Request& r) {
                  r.rules.logit_bias = {{2, 1}, {3, bad}};
                }),
                AllOf(HasSubstr("logit_bias of token 3"), HasSubstr("[-100, 100]")));
  }
  EXPECT_THAT(refusal([](Request& r) {
                r.rules.logit_bias = {{2, 1}, {37, 1}};
              }),
              AllOf(HasSubstr("logit_bias[1] is 37"), HasSubstr("[0, 37)")));
  EXPECT_THAT(refusal([](Request& r) {
                r.rules.logit_bias = {{-1, 1}};
              }),
              HasSubstr("logit_bias[0] is -1"));
  EXPECT_THAT(refusal([](Request& r) {
                r.rules.logit_bias = {{4, 1}, {5, 1}, {4, 2}};
              }),
              HasSubstr("logit_bias has token 4 twice"));
  for (const std::int64_t bad : {-1, 5}) {
    EXPECT_THAT(refusal([&](Request& r) { r.rules.min_new_tokens = bad; }),
                AllOf(HasSubstr("min_new_tokens is"), HasSubstr("max_new_tokens (4)")));
  }
  for (const std::int64_t bad : {-1, 21}) {
    EXPECT_THAT(refusal([&](Request& r) { r.num_top_logprobs = bad; }),
                AllOf(HasSubstr("num_top_logprobs is"), HasSubstr("0 to 20")));
  }
  for (const std::int64_t bad : {-2, 5}) {
    EXPECT_THAT(refusal([&](Request& r) { r.prompt_logprobs_from = bad; }),
                AllOf(HasSubstr("prompt_logprobs_from is"), HasSubstr("4 tokens")));
  }
  Request limits = make_request(4, 4);
  limits.rules = {.repetition_penalty = 2,
                  .frequency_penalty = -2,
                  .presence_penalty = 2,
                  .logit_bias = {{0, 100}, {36, -100}},
                  .min_new_tokens = 4};
  limits.num_top_logprobs = 20;
  limits.prompt_logprobs_from = 4;
  EXPECT_TRUE(engine->submit(limits).ok());
  engine->run_until_idle();
}

}  // namespace
}  // namespace tandem::test
