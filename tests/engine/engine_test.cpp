#include "engine/engine.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>

#include "engine_rig.h"

namespace tandem::test {
namespace {

using ::testing::HasSubstr;

TEST(Engine, StopsAtStopIdsAndAtEosUnlessIgnored) {
  Rig rig;
  Request request = make_request(5, 12, 1);
  const std::vector<std::int32_t> free_run = expected_output(rig, request).tokens;
  const auto first_at = [&](std::int32_t token) {
    return std::find(free_run.begin(), free_run.end(), token) - free_run.begin();
  };
  EngineOptions options = small_options();
  options.eos_ids = {free_run[6]};
  const auto engine = rig.engine(options);
  const std::vector<std::int32_t> until_eos(free_run.begin(),
                                            free_run.begin() + first_at(free_run[6]) + 1);
  RequestOutput output = run_one(*engine, request);
  EXPECT_EQ(output.tokens, until_eos);  // the token that stops is part of the output
  EXPECT_EQ(output.finish_reason, FinishReason::kStop);
  EXPECT_EQ(output.logprobs.size(), output.tokens.size());

  request.ignore_eos = true;
  output = run_one(*engine, request);
  EXPECT_EQ(output.tokens, free_run);
  EXPECT_EQ(output.finish_reason, FinishReason::kLength);

  request.stop_ids = {free_run[2]};
  output = run_one(*engine, request);
  EXPECT_EQ(output.tokens, std::vector<std::int32_t>(free_run.begin(),
                                                     free_run.begin() + first_at(free_run[2]) + 1));
  EXPECT_EQ(output.finish_reason, FinishReason::kStop);
}

TEST(Engine, AStopOnTheLastAllowedTokenIsAStop) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  Request request = make_request(5, 1, 1);
  EXPECT_EQ(run_one(*engine, request).finish_reason, FinishReason::kLength);
  request.stop_ids = {expected_output(rig, request).tokens[0]};
  EXPECT_EQ(run_one(*engine, request).finish_reason, FinishReason::kStop);
}

TEST(Engine, FillsTheLongestSequenceExactly) {
  for (const std::int64_t page_size : {1, 4, 5}) {
    Rig rig;
    EngineOptions options = small_options();
    options.max_seq_len = 20;
    options.page_size = page_size;
    options.num_pages = (20 + page_size - 1) / page_size;
    const auto engine = rig.engine(options);
    expect_all_as_alone(rig, *engine, {make_request(19, 1, 1), make_request(1, 19, 2)});
  }
}

TEST(Engine, LogprobsAreOfTheFullSoftmaxAtTheSamplingTemperature) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  for (const float temperature : {0.0F, 0.7F, 1.0F, 2.0F}) {
    Request request = make_request(4, 6, 9);
    request.sampling = {.temperature = temperature, .top_k = temperature == 2.0F ? 5 : 0};
    const RequestOutput output = run_one(*engine, request);
    std::vector<std::int32_t> tokens = request.prompt;
    for (std::size_t i = 0; i < output.tokens.size(); ++i) {
      const std::vector<float> logits = rig.model.expected_logits(tokens);
      const double divisor = temperature == 0.0F ? 1.0 : static_cast<double>(temperature);
      double sum = 0;
      for (const float logit : logits) {
        sum += std::exp(static_cast<double>(logit) / divisor);
      }
      const double expected =
          static_cast<double>(logits[usize(output.tokens[i])]) / divisor - std::log(sum);
      // fp32 sums over the vocabulary: each of V + 4 roundings is at most eps/2 of a magnitude that
      // stays below |logit / T| + log V < 32.
      const double tolerance = 1.1920928955078125e-07 * 0.5 * (FakeModel::kVocab + 4) * 32;
      EXPECT_NEAR(static_cast<double>(output.logprobs[i]), expected, tolerance);
      tokens.push_back(output.tokens[i]);
    }
  }
}

TEST(Engine, GreedyTakesTheLargestLogit) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  Request request = make_request(4, 8, 9);
  request.sampling.temperature = 1e-7F;
  const RequestOutput output = run_one(*engine, request);
  std::vector<std::int32_t> tokens = request.prompt;
  for (const std::int32_t token : output.tokens) {
    const std::vector<float> logits = rig.model.expected_logits(tokens);
    EXPECT_EQ(token, std::max_element(logits.begin(), logits.end()) - logits.begin());
    tokens.push_back(token);
  }
}

TEST(Engine, SeedAndSequenceIdChangeTheDraws) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  Request request = make_request(6, 16, 1);
  const RequestOutput base = run_one(*engine, request);
  EXPECT_TRUE(same_output(run_one(*engine, request), base));
  request.seed += 1;
  EXPECT_NE(run_one(*engine, request).tokens, base.tokens);
  request.seed -= 1;
  request.sequence_id += 1;
  EXPECT_NE(run_one(*engine, request).tokens, base.tokens);
}

TEST(Engine, EventsAddUpToTheOutputs) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  const std::vector<Request> requests = mixed_requests(9);
  std::unordered_map<std::uint64_t, RequestOutput> streamed;
  std::vector<RequestId> ids = submit_all(*engine, requests);
  while (engine->has_work()) {
    for (const StepEvent& event : engine->step()) {
      RequestOutput& output = streamed[value_of(event.id)];
      output.tokens.push_back(event.token);
      output.logprobs.push_back(event.logprob);
      EXPECT_EQ(event.finish.has_value(), engine->take_output(event.id).ok());
      if (event.finish) {
        output.finish_reason = *event.finish;
      }
    }
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const RequestOutput expected = expected_output(rig, requests[i]);
    EXPECT_EQ(streamed[value_of(ids[i])].tokens, expected.tokens);
    EXPECT_EQ(streamed[value_of(ids[i])].logprobs, expected.logprobs);
    EXPECT_EQ(streamed[value_of(ids[i])].finish_reason, expected.finish_reason);
  }
}

TEST(Engine, ReturnsOnlyWhatWasAskedFor) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  Request request = make_request(6, 3, 1);
  request.want_logprobs = false;
  request.want_routed_experts = false;
  const RequestOutput output = run_one(*engine, request);
  EXPECT_TRUE(output.logprobs.empty());
  EXPECT_TRUE(output.routed_experts.empty());
  EXPECT_EQ(output.tokens, expected_output(rig, request).tokens);
}

TEST(Engine, AbortIsIdempotentInEveryState) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 1;
  options.max_batch_tokens = 4;
  const auto engine = rig.engine(options);
  const Request request = make_request(6, 8, 1);
  const RequestId running = engine->submit(request).value_or_throw();
  const RequestId waiting = engine->submit(request).value_or_throw();
  const RequestId later = engine->submit(request).value_or_throw();
  engine->step();  // half of the first prompt
  engine->step();
  engine->step();
  EXPECT_TRUE(engine->abort(waiting));
  EXPECT_TRUE(engine->abort(running));
  EXPECT_FALSE(engine->abort(running));
  engine->check_integrity();
  engine->run_until_idle();
  EXPECT_FALSE(engine->abort(later));             // finished
  EXPECT_FALSE(engine->abort(RequestId{12345}));  // never existed
  const RequestOutput aborted = engine->take_output(running).value_or_throw();
  EXPECT_EQ(aborted.finish_reason, FinishReason::kAborted);
  const RequestOutput expected = expected_output(rig, request);
  ASSERT_EQ(aborted.tokens.size(), 2U);
  EXPECT_EQ(aborted.tokens[1], expected.tokens[1]);
  EXPECT_EQ(aborted.logprobs.size(), 2U);
  EXPECT_TRUE(engine->take_output(waiting).value_or_throw().tokens.empty());
  EXPECT_TRUE(same_output(engine->take_output(later).value_or_throw(), expected));
  EXPECT_FALSE(engine->abort(running));  // taken
  expect_idle_and_empty(*engine);
}

TEST(Engine, NonFiniteLogitsFailTheirRequestOnly) {
  Rig rig;
  rig.model.nan_after_token = 17;
  const auto engine = rig.engine(small_options());
  const std::vector<Request> requests = mixed_requests(20);
  std::vector<RequestId> ids = submit_all(*engine, requests);
  engine->run_until_idle();
  int errors = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const RequestOutput output = engine->take_output(ids[i]).value_or_throw();
    EXPECT_TRUE(same_output(output, expected_output(rig, requests[i])));
    errors += output.finish_reason == FinishReason::kError ? 1 : 0;
    EXPECT_EQ(output.error.empty(), output.finish_reason != FinishReason::kError);
  }
  EXPECT_GT(errors, 0);
  EXPECT_LT(errors, 20);
  expect_idle_and_empty(*engine);
}

TEST(Engine, AFailedStepIsRepeated) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  const std::vector<Request> requests = mixed_requests(5);
  std::vector<RequestId> ids = submit_all(*engine, requests);
  rig.model.throw_at_call = 0;
  int throws = 0;
  while (engine->has_work()) {
    try {
      engine->step();
    } catch (const std::runtime_error&) {
      ++throws;
      engine->check_integrity();
      rig.model.throw_at_call = rig.model.num_calls + 3;
    }
  }
  EXPECT_GT(throws, 2);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_TRUE(same_output(engine->take_output(ids[i]).value_or_throw(),
                            expected_output(rig, requests[i])));
  }
}

TEST(Engine, NewWeightsReplaceEverythingCached) {
  Rig rig;
  EngineOptions options = small_options();
  options.first_weight_version = 4;
  const auto engine = rig.engine(options);
  const Request request = make_request(6, 10, 1);
  const RequestId id = engine->submit(request).value_or_throw();
  for (int i = 0; i < 3; ++i) {
    engine->step();
  }
  const std::vector<std::int32_t> old_tokens = expected_output(rig, request).tokens;
  rig.model.weights = 99;
  engine->on_weights_changed();
  engine->check_integrity();
  engine->run_until_idle();
  const RequestOutput output = engine->take_output(id).value_or_throw();
  Request rest =
      request;  // three tokens came from the old weights, the others see them as a prompt
  rest.prompt.insert(rest.prompt.end(), old_tokens.begin(), old_tokens.begin() + 3);
  rest.max_new_tokens = 7;
  const RequestOutput expected = expected_output(rig, rest);
  EXPECT_EQ(std::vector<std::int32_t>(output.tokens.begin() + 3, output.tokens.end()),
            expected.tokens);
  EXPECT_EQ(output.routed_experts, expected.routed_experts);
  ASSERT_EQ(output.weight_spans.size(), 2U);
  EXPECT_EQ(output.weight_spans[0].first_token, 0);
  EXPECT_EQ(output.weight_spans[0].version, 4);
  EXPECT_EQ(output.weight_spans[1].first_token, 3);
  EXPECT_EQ(output.weight_version(), 5);
  engine->on_weights_changed(40);
  EXPECT_EQ(run_one(*engine, request).weight_version(), 40);
}

TEST(Engine, FirstComeFirstServed) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 2;
  const auto engine = rig.engine(options);
  std::vector<RequestId> ids;
  for (std::uint64_t i = 0; i < 6; ++i) {
    ids.push_back(engine->submit(make_request(5, 4, i)).value_or_throw());
  }
  std::vector<RequestId> finished;
  while (engine->has_work()) {
    for (const StepEvent& event : engine->step()) {
      if (event.finish) {
        finished.push_back(event.id);
      }
    }
  }
  EXPECT_EQ(finished, ids);  // equal lengths end in the order they came
}

TEST(Engine, PrefillDoesNotStarveDecodes) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_batch_tokens = 4;
  options.max_running_seqs = 4;
  const auto engine = rig.engine(options);
  const RequestId first = engine->submit(make_request(2, 12, 1)).value_or_throw();
  engine->step();
  for (std::uint64_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(engine->submit(make_request(40, 2, 10 + i)).ok());
  }
  for (int i = 0; i < 11; ++i) {  // one token each step, while 120 prompt tokens are computed
    const auto events = engine->step();
    EXPECT_TRUE(std::any_of(events.begin(), events.end(),
                            [&](const StepEvent& event) { return event.id == first; }));
    EXPECT_LE(rig.model.most_rows, 4);
  }
  EXPECT_TRUE(engine->take_output(first).ok());
  EXPECT_GT(engine->stats().prefill_tokens, 20);
}

TEST(Engine, CountsTokens) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  run_one(*engine, make_request(9, 5, 1));
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.prefill_tokens, 9);
  EXPECT_EQ(stats.decode_tokens, 4);  // the last token is never fed
  EXPECT_EQ(stats.num_steps, 5);
  EXPECT_EQ(rig.model.num_rows, 13);
}

}  // namespace
}  // namespace tandem::test
