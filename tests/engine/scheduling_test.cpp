// scheduling_test.cpp — whose turn it is: priorities, fairness among clients, bounds of the queue,
// deadlines, pauses, budgets.
#include <map>

#include <gmock/gmock.h>

#include "engine_rig.h"

namespace tandem::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Request of_priority(std::int32_t priority, std::uint64_t id, std::int64_t prompt_size = 5,
                    std::int64_t max_new_tokens = 4) {
  Request request = make_request(prompt_size, max_new_tokens, id);
  request.priority = priority;
  return request;
}

std::vector<RequestId> finishing_order(Engine& engine) {
  std::vector<RequestId> finished;
  while (engine.has_work()) {
    for (const StepEvent& event : engine.step()) {
      if (event.finish) {
        finished.push_back(event.id);
      }
    }
    engine.check_integrity();
  }
  return finished;
}

TEST(Priorities, HigherFirstThenInOrderOfArrival) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 1;
  const auto engine = rig.engine(options);
  std::vector<RequestId> ids;
  for (const std::int32_t priority : {0, -3, 5, 0, 5, -3}) {
    ids.push_back(engine->submit(of_priority(priority, ids.size())).value_or_throw());
  }
  EXPECT_EQ(finishing_order(*engine),
            (std::vector{ids[2], ids[4], ids[0], ids[3], ids[1], ids[5]}));
}

TEST(Priorities, AHigherOneTakesASeatWhenThereIsNone) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 2;
  const auto engine = rig.engine(options);
  const RequestId first = engine->submit(of_priority(0, 1, 5, 20)).value_or_throw();
  const RequestId second = engine->submit(of_priority(0, 2, 5, 20)).value_or_throw();
  engine->step();
  const RequestId high = engine->submit(of_priority(1, 3)).value_or_throw();
  const RequestId equal = engine->submit(of_priority(0, 4)).value_or_throw();
  EXPECT_EQ(finishing_order(*engine), (std::vector{high, first, second, equal}));
  EXPECT_EQ(engine->take_output(first).value_or_throw().num_preemptions, 0);
  const RequestOutput output = engine->take_output(second).value_or_throw();
  EXPECT_EQ(output.num_preemptions, 1);  // the newest of the lowest
  EXPECT_TRUE(same_output(output, expected_output(rig, of_priority(0, 2, 5, 20))));
}

TEST(Priorities, NobodyIsPreemptedForOneThatFitsAnyway) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(engine->submit(of_priority(static_cast<std::int32_t>(i), i)).ok());
    engine->step();
  }
  engine->run_until_idle();
  EXPECT_EQ(engine->stats().num_preemptions, 0);
}

TEST(Priorities, PagesAreTakenFromLowerOnesOnly) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_seq_len = 32;
  options.num_pages = 12;  // of 4 tokens
  const auto engine = rig.engine(options);
  const RequestId equal = engine->submit(of_priority(2, 1, 16, 8)).value_or_throw();
  const RequestId low = engine->submit(of_priority(0, 2, 16, 8)).value_or_throw();
  engine->step();
  engine->step();
  const RequestId high = engine->submit(of_priority(2, 3, 16, 8)).value_or_throw();
  engine->step();
  engine->check_integrity();
  engine->step();
  EXPECT_EQ(engine->stats().num_running, 2);
  EXPECT_EQ(finishing_order(*engine), (std::vector{equal, high, low}));
  EXPECT_EQ(engine->take_output(equal).value_or_throw().num_preemptions, 0);
  EXPECT_EQ(engine->take_output(high).value_or_throw().num_preemptions, 0);
  EXPECT_GT(engine->take_output(low).value_or_throw().num_preemptions, 0);
}

TEST(Fairness, ClientsTakeTurnsByTokens) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 1;
  const auto engine = rig.engine(options);
  std::map<std::uint64_t, std::string> client_of;
  const auto submit = [&](const char* client, std::int64_t prompt_size) {
    Request request = make_request(prompt_size, 2, client_of.size());
    request.client = client;
    client_of[value_of(engine->submit(request).value_or_throw())] = client;
  };
  for (int i = 0; i < 12; ++i) {
    submit("busy", 9);
  }
  submit("large", 29);
  submit("large", 29);
  submit("small", 4);
  submit("small", 4);
  std::string order;
  for (const RequestId id : finishing_order(*engine)) {
    order += client_of[value_of(id)].front();
  }
  // A request costs busy 10 tokens, large 30, small 5; the smallest sum so far is next, and among
  // equal ones the oldest request.
  EXPECT_EQ(order, "blssbbblbbbbbbbb");
}

TEST(Fairness, ANewClientDoesNotOwnThePast) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 1;
  const auto engine = rig.engine(options);
  Request request = make_request(9, 2, 1);
  request.client = "a";
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(engine->submit(request).ok());
  }
  for (int i = 0; i < 6; ++i) {
    engine->step();
  }
  request.client = "b";
  std::vector<RequestId> of_b;
  for (int i = 0; i < 3; ++i) {
    of_b.push_back(engine->submit(request).value_or_throw());
  }
  const std::vector<RequestId> finished = finishing_order(*engine);
  ASSERT_EQ(finished.size(), 6U);
  EXPECT_EQ(finished[1], of_b[0]);
  EXPECT_EQ(finished[3], of_b[1]);  // level from then on, not all three at once
  EXPECT_EQ(finished[5], of_b[2]);
}

TEST(Queue, IsBoundedAndSaysSo) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 1;
  options.max_queued = 3;
  const auto engine = rig.engine(options);
  const Request request = of_priority(0, 1);
  ASSERT_TRUE(engine->submit(request).ok());
  engine->step();  // runs: does not count
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(engine->submit(request).ok());
  }
  const Expected<RequestId> refused = engine->submit(request);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.failure().kind, Failure::Kind::kOverloaded);
  EXPECT_EQ(refused.message(), "the queue is full: 3 of at most 3 requests wait");
  Request wrong = request;
  wrong.prompt.clear();
  EXPECT_EQ(engine->submit(wrong).failure().kind, Failure::Kind::kInvalid);
  engine->run_until_idle();
  EXPECT_FALSE(engine->submit_group(request, 4).ok());  // all or none
  EXPECT_EQ(engine->stats().num_waiting, 0);
  EXPECT_TRUE(engine->submit_group(request, 3).ok());
}

TEST(Queue, HigherPrioritiesPushOutTheNewestOfTheLowest) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 1;
  options.max_queued = 3;
  const auto engine = rig.engine(options);
  ASSERT_TRUE(engine->submit(of_priority(9, 1)).ok());
  engine->step();
  std::vector<RequestId> ids;
  for (const std::int32_t priority : {0, 1, 0}) {
    ids.push_back(engine->submit(of_priority(priority, ids.size())).value_or_throw());
  }
  EXPECT_FALSE(engine->submit(of_priority(0, 7)).ok());
  EXPECT_FALSE(engine->submit_group(of_priority(1, 7), 3).ok());  // only two rank lower
  ASSERT_TRUE(engine->submit(of_priority(2, 8)).ok());
  engine->check_integrity();
  const auto events = engine->step();
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events[0].id, ids[2]);
  EXPECT_EQ(events[0].finish, FinishReason::kAborted);
  const RequestOutput output = engine->take_output(ids[2]).value_or_throw();
  EXPECT_EQ(output.abort_cause, AbortCause::kQueueFull);
  EXPECT_THAT(output.error, HasSubstr("higher priority"));
  engine->run_until_idle();
  EXPECT_EQ(engine->take_output(ids[0]).value_or_throw().finish_reason, FinishReason::kLength);
}

TEST(Queue, RequestsThatRanAreNotPushedOut) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 1;
  options.max_queued = 1;
  const auto engine = rig.engine(options);
  const RequestId id = engine->submit(of_priority(0, 1)).value_or_throw();
  engine->step();
  engine->preempt_all();
  EXPECT_FALSE(engine->submit(of_priority(5, 2)).ok());
  engine->run_until_idle();
  EXPECT_EQ(engine->take_output(id).value_or_throw().finish_reason, FinishReason::kLength);
}

TEST(Deadlines, EndWhatIsLate) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_running_seqs = 1;
  const auto engine = rig.engine(options);
  Request request = of_priority(0, 1, 5, 8);
  request.timeout_s = 1e9;
  const RequestId patient = engine->submit(request).value_or_throw();
  engine->step();
  request.timeout_s = 0;
  request.queue_timeout_s = 1e-9;
  const RequestId in_queue = engine->submit(request).value_or_throw();
  request.queue_timeout_s = 1e9;
  request.timeout_s = 1e-9;
  const RequestId late = engine->submit(request).value_or_throw();
  engine->check_integrity();
  const auto events = engine->step();
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(events[0].id, in_queue);
  EXPECT_EQ(events[0].token, -1);
  EXPECT_EQ(events[1].id, late);
  EXPECT_EQ(events[2].id, patient);
  RequestOutput output = engine->take_output(in_queue).value_or_throw();
  EXPECT_EQ(output.finish_reason, FinishReason::kAborted);
  EXPECT_EQ(output.abort_cause, AbortCause::kQueueTimeout);
  EXPECT_THAT(output.error, HasSubstr("queue_timeout_s is 1e-09"));
  output = engine->take_output(late).value_or_throw();
  EXPECT_EQ(output.abort_cause, AbortCause::kTimeout);
  EXPECT_THAT(output.error, AllOf(HasSubstr("timeout_s is 1e-09"), Not(HasSubstr("queue"))));
  engine->run_until_idle();
  EXPECT_EQ(engine->take_output(patient).value_or_throw().finish_reason, FinishReason::kLength);
  for (const double seconds : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
    request.timeout_s = seconds;
    EXPECT_THAT(engine->submit(request).message(), HasSubstr("timeout_s is"));
  }
  expect_idle_and_empty(*engine);
}

TEST(Deadlines, AFailedStepStillTellsThem) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  Request request = of_priority(0, 1);
  ASSERT_TRUE(engine->submit(request).ok());
  request.timeout_s = 1e-9;
  const RequestId late = engine->submit(request).value_or_throw();
  rig.model.throw_at_call = 0;
  EXPECT_THROW(engine->step(), std::runtime_error);
  engine->check_integrity();
  const auto events = engine->step();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].id, late);
  EXPECT_EQ(engine->step().size(), 1U);  // once
}

TEST(Deadlines, WaitingInTheQueueEndsWithTheFirstRun) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  Request request = of_priority(0, 1, 5, 8);
  request.queue_timeout_s = 1e9;
  const RequestId id = engine->submit(request).value_or_throw();
  engine->step();
  engine->preempt_all();
  engine->run_until_idle();
  EXPECT_EQ(engine->take_output(id).value_or_throw().finish_reason, FinishReason::kLength);
}

TEST(Pause, FreezesOrRetracts) {
  for (const PauseMode mode : {PauseMode::kInPlace, PauseMode::kRetract}) {
    Rig rig;
    const auto engine = rig.engine(small_options());
    const std::vector<Request> requests = mixed_requests(5);
    std::vector<RequestId> ids = submit_all(*engine, requests);
    engine->step();
    engine->step();
    engine->pause(mode);
    EXPECT_TRUE(engine->paused());
    EXPECT_FALSE(engine->has_work());
    const std::int64_t rows = rig.model.num_rows;
    EXPECT_TRUE(engine->step().empty());
    EXPECT_EQ(rig.model.num_rows, rows);
    EXPECT_EQ(engine->stats().num_running == 0, mode == PauseMode::kRetract);
    EXPECT_EQ(engine->flush_cache().ok(), mode == PauseMode::kRetract);
    Request late = make_request(4, 3, 77);
    ids.push_back(engine->submit(late).value_or_throw());
    late.timeout_s = 1e-9;
    const RequestId too_late = engine->submit(late).value_or_throw();
    EXPECT_EQ(engine->step().size(), 1U);  // deadlines hold all the same
    EXPECT_EQ(engine->take_output(too_late).value_or_throw().abort_cause, AbortCause::kTimeout);
    engine->check_integrity();
    engine->resume();
    engine->run_until_idle();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      EXPECT_TRUE(same_output(engine->take_output(ids[i]).value_or_throw(),
                              expected_output(rig, requests[i])));
    }
    EXPECT_TRUE(engine->take_output(ids.back()).ok());
  }
}

TEST(Pause, AbortsAndNewWeightsMeanwhile) {
  Rig rig;
  const auto engine = rig.engine(cached_options());
  const Request request = cacheable_request(random_tokens(20, 1), 8, 1);
  const RequestId first = engine->submit(request).value_or_throw();
  const RequestId second = engine->submit(request).value_or_throw();
  engine->step();
  engine->step();
  engine->pause(PauseMode::kInPlace);
  EXPECT_TRUE(engine->abort(first));
  EXPECT_FALSE(engine->abort(first));
  rig.model.weights = 5;
  engine->on_weights_changed();
  engine->check_integrity();
  engine->resume();
  engine->run_until_idle();
  EXPECT_EQ(engine->take_output(first).value_or_throw().abort_cause, AbortCause::kCaller);
  EXPECT_EQ(engine->take_output(second).value_or_throw().tokens.size(), 8U);
  expect_idle_and_empty(*engine);
}

TEST(Budgets, PromptsAndDecodesHaveTheirOwn) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_prefill_tokens = 3;
  const auto engine = rig.engine(options);
  expect_all_as_alone(rig, *engine, mixed_requests(12));
  EXPECT_LE(rig.model.most_rows, 3 + 5);  // of six seats at least one prefills then
  options.max_prefill_tokens = -1;
  EXPECT_THAT(options.validate().message(), HasSubstr("max_prefill_tokens is -1"));
}

TEST(ForcedPreemption, ChangesNothingAndAlwaysEnds) {
  for (std::int64_t every = 1; every <= 4; ++every) {
    for (const bool cached : {false, true}) {
      Rig rig;
      EngineOptions options = cached_options();
      options.max_batch_tokens = 6;
      options.preempt_every = every;
      options.prefix_cache = cached;
      const auto engine = rig.engine(options);
      std::vector<Request> requests = mixed_requests(8);
      for (Request& request : requests) {
        request.want_routed_experts = !cached;
      }
      expect_all_as_alone(rig, *engine, requests);
      EXPECT_GT(engine->stats().num_preemptions, 5);
    }
  }
}

}  // namespace
}  // namespace tandem::test
