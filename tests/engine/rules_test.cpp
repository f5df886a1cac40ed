// rules_test.cpp — logit rules, constraints and alternatives of requests: each as computed from the
// plain tokens, among requests without any, in groups, under preemption and on a device.
#include <gmock/gmock.h>

#include "rule_requests.h"

namespace tandem::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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
  Rig rig;
  expect_dead_ends(rig);
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
