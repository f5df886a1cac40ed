// prompt_logprobs_test.cpp — log-probabilities of prompts: of the right position, stitched over
// chunks, within the rows of logits there are, and equal to what sampling reports.
#include <gmock/gmock.h>

#include "rule_requests.h"

namespace tandem::test {
namespace {

using ::testing::HasSubstr;

RequestOutput run_one(Engine& engine, const Request& request) {
  const RequestId id = engine.submit(request).value_or_throw();
  engine.run_until_idle();
  return engine.take_output(id).value_or_throw();
}

TEST(PromptLogprobs, EveryStartAndLength) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  for (const std::int64_t size : {1, 2, 9}) {
    for (std::int64_t from = 0; from <= size; ++from) {
      for (const std::int64_t new_tokens : {0, 3}) {
        Request request = make_request(size, new_tokens, 4);
        request.prompt_logprobs_from = from;
        request.num_top_logprobs = 2;
        const RequestOutput output = run_one(*engine, request);
        EXPECT_TRUE(same_output(output, expected_output(rig, request)))
            << size << " from " << from << " new " << new_tokens;
        ASSERT_EQ(isize(output.prompt_logprobs), size - from);
        EXPECT_EQ(from == 0,
                  !output.prompt_logprobs.empty() && std::isnan(output.prompt_logprobs[0]));
        EXPECT_EQ(output.finish_reason, FinishReason::kLength);
      }
    }
  }
  expect_idle_and_empty(*engine);
}

TEST(PromptLogprobs, AnyChunksAndSeats) {
  for (const std::int64_t budget : {1, 3, 7, 64}) {
    for (const std::int64_t seats : {1, 2, 6}) {
      SCOPED_TRACE(fmt::format("max_batch_tokens {} seats {}", budget, seats));
      Rig rig;
      EngineOptions options = small_options();
      options.max_batch_tokens = budget;
      options.max_running_seqs = seats;
      const auto engine = rig.engine(options);
      expect_all_as_alone(rig, *engine, scored_requests(16));
    }
  }
}

TEST(PromptLogprobs, PreemptedAtEveryStep) {
  for (const std::int64_t every : {2, 3, 5}) {
    Rig rig;
    EngineOptions options = small_options();
    options.max_batch_tokens = 40;
    const auto engine = rig.engine(options);
    const std::vector<Request> requests = scored_requests(9);
    std::vector<RequestId> ids = submit_all(*engine, requests);
    for (std::int64_t step = 1; engine->has_work(); ++step) {
      engine->step();
      if (step % every == 0) {
        engine->preempt_all();
        engine->check_integrity();
      }
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      EXPECT_TRUE(same_output(engine->take_output(ids[i]).value_or_throw(),
                              expected_output(rig, requests[i])))
          << i;
    }
    expect_idle_and_empty(*engine);
  }
}

TEST(PromptLogprobs, GroupsShareThem) {
  for (const std::int64_t budget : {3, 64}) {
    for (const std::int64_t new_tokens : {0, 5}) {
      for (const int aborted_after : {0, 2}) {
        Rig rig;
        EngineOptions options = small_options();
        options.max_batch_tokens = budget;
        const auto engine = rig.engine(options);
        Request request = make_request(14, new_tokens, 8);
        request.prompt_logprobs_from = 3;
        const auto ids = engine->submit_group(request, 4).value_or_throw();
        for (int i = 0; i < aborted_after; ++i) {
          engine->step();
          engine->check_integrity();
        }
        const bool aborted = aborted_after > 0 && engine->abort(ids[0]);  // hands its prompt on
        engine->run_until_idle();
        for (std::size_t i = aborted ? 1 : 0; i < ids.size(); ++i) {
          Request one = request;
          one.sequence_id += i;
          EXPECT_TRUE(
              same_output(engine->take_output(ids[i]).value_or_throw(), expected_output(rig, one)))
              << i;
        }
        expect_idle_and_empty(*engine);
      }
    }
  }
}

TEST(PromptLogprobs, ScoringAResponseGivesWhatItsSamplingReported) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  for (const Request& request : mixed_requests(12)) {
    Request sampled = request;
    sampled.num_top_logprobs = 4;
    const RequestOutput response = run_one(*engine, sampled);
    Request scoring = score_only(sampled);
    scoring.prompt.insert(scoring.prompt.end(), response.tokens.begin(), response.tokens.end());
    scoring.prompt_logprobs_from = isize(request.prompt);
    const RequestOutput scores = run_one(*engine, scoring);
    EXPECT_EQ(scores.prompt_logprobs, response.logprobs);
    EXPECT_TRUE(same_top(scores.prompt_top_logprobs, response.top_logprobs));
  }
}

TEST(PromptLogprobs, ScoringTakesNoSeatFromOthersForLong) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 4;
  const auto engine = rig.engine(options);
  Request scoring = make_request(64, 0, 1);  // as long as a sequence may be
  scoring.prompt_logprobs_from = 0;
  const RequestId first = engine->submit(scoring).value_or_throw();
  engine->step();
  const RequestId second = engine->submit(make_request(4, 4, 2)).value_or_throw();
  for (int i = 0; i < 5; ++i) {
    engine->step();
  }
  EXPECT_TRUE(engine->take_output(second).ok());
  EXPECT_FALSE(engine->take_output(first).ok());
  engine->run_until_idle();
  EXPECT_TRUE(
      same_output(engine->take_output(first).value_or_throw(), expected_output(rig, scoring)));
}

TEST(PromptLogprobs, NonFiniteLogitsFailTheRequest) {
  for (const std::int64_t new_tokens : {0, 4}) {
    for (const std::int64_t budget : {4, 64}) {
      for (const std::int64_t at : {2, 9, 14}) {
        Rig rig;
        rig.model.nan_after_token = 36;
        EngineOptions options = small_options();
        options.max_batch_tokens = budget;
        const auto engine = rig.engine(options);
        Request request = make_request(16, new_tokens, 4);
        std::ranges::replace(request.prompt, 36, 1);
        request.prompt[usize(at)] = 36;
        Request other = make_request(5, 4, 5);
        std::ranges::replace(other.prompt, 36, 1);
        request.prompt_logprobs_from = 0;
        const auto ids = engine->submit_group(request, 2).value_or_throw();
        const RequestId good = engine->submit(other).value_or_throw();
        std::int64_t events = 0;
        while (engine->has_work()) {
          for (const StepEvent& event : engine->step()) {
            events += event.id != good && event.finish == FinishReason::kError ? 1 : 0;
          }
          engine->check_integrity();
        }
        EXPECT_EQ(events, 2);
        for (const RequestId id : ids) {
          const RequestOutput output = engine->take_output(id).value_or_throw();
          EXPECT_EQ(output.finish_reason, FinishReason::kError);
          EXPECT_EQ(output.error,
                    fmt::format("the model's logits at position {} are not finite", at + 1));
        }
        EXPECT_TRUE(
            same_output(engine->take_output(good).value_or_throw(), expected_output(rig, other)));
        expect_idle_and_empty(*engine);
      }
    }
  }
}

TEST(PromptLogprobs, OnlyScoringMayAskForNoToken) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  Request request = make_request(64, 0, 1);
  EXPECT_THAT(engine->submit(request).message(), HasSubstr("max_new_tokens is 0"));
  request.prompt_logprobs_from = 64;
  const RequestOutput output = run_one(*engine, request);
  EXPECT_TRUE(output.tokens.empty() && output.prompt_logprobs.empty());
  EXPECT_EQ(output.finish_reason, FinishReason::kLength);
  request.prompt = random_tokens(65, 1);
  EXPECT_THAT(engine->submit(request).message(), HasSubstr("max_seq_len 64"));
}

}  // namespace
}  // namespace tandem::test
