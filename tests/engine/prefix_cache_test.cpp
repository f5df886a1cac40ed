// prefix_cache_test.cpp — a request that resumes on a cached beginning gets the bits it would get
// without, and the cache holds what it should and nothing else.
#include <gmock/gmock.h>

#include "engine_rig.h"

namespace tandem::test {
namespace {

using ::testing::HasSubstr;

std::int64_t grid_below(std::int64_t length, std::int64_t grid) {
  return length / grid * grid;
}

TEST(PrefixCache, ResumesAtTheLastGridPointBeforeTheEndOfThePrompt) {
  for (const std::int64_t grid : {4, 8, 64}) {
    for (std::int64_t m = 1; m <= 3; ++m) {
      for (const std::int64_t off : {-1, 0, 1}) {
        const std::int64_t size = m * grid + off;
        SCOPED_TRACE(fmt::format("grid {} prompt {}", grid, size));
        Rig rig;
        EngineOptions options = small_options();
        options.max_seq_len = 240;
        options.checkpoint_tokens = grid;
        const auto engine = rig.engine(options);
        const Request request = cacheable_request(random_tokens(size, 1), 2, 1);
        const RequestOutput cold = run_one(*engine, request);
        EXPECT_TRUE(same_output(cold, expected_output(rig, request)));
        EXPECT_EQ(cold.cached_tokens, 0);
        EXPECT_EQ(rig.model.num_rows, size + 1);
        const RequestOutput warm = run_one(*engine, request);
        EXPECT_TRUE(same_output(warm, cold));
        EXPECT_EQ(warm.cached_tokens, grid_below(size - 1, grid));
        EXPECT_EQ(rig.model.num_rows, 2 * (size + 1) - warm.cached_tokens);
        const Request extended = cacheable_request(longer(request.prompt, 9, 5), 2, 1);
        const RequestOutput output = run_one(*engine, extended);
        EXPECT_TRUE(same_output(output, expected_output(rig, extended)));
        EXPECT_EQ(output.cached_tokens, warm.cached_tokens);
        EXPECT_EQ(engine->stats().prefix.state_tokens, 2 * warm.cached_tokens);
        expect_idle_and_empty(*engine);
      }
    }
  }
}

TEST(PrefixCache, TailsOfEveryLengthEqualAColdRun) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_seq_len = 200;
  options.max_batch_tokens = 40;
  options.checkpoint_tokens = 64;
  const auto engine = rig.engine(options);
  const std::vector<std::int32_t> prefix = random_tokens(128, 3);
  run_one(*engine, cacheable_request(longer(prefix, 1, 0), 1));
  for (std::int64_t tail = 1; tail <= 65; ++tail) {
    SCOPED_TRACE(fmt::format("tail {}", tail));
    const Request request = cacheable_request(longer(prefix, tail, usize(tail)), 2, usize(tail));
    const RequestOutput output = run_one(*engine, request);
    EXPECT_TRUE(same_output(output, expected_output(rig, request)));
    EXPECT_EQ(output.cached_tokens, 128);
  }
}

TEST(PrefixCache, RequestsOfOtherPrefixesDoNotDisturb) {
  for (const std::int64_t budget : {1, 5, 64}) {
    Rig rig;
    EngineOptions options = cached_options();
    options.max_batch_tokens = budget;
    options.num_checkpoint_slots = 20;
    const auto engine = rig.engine(options);
    const std::vector<std::int32_t> shared = random_tokens(20, 3);
    const Request a = cacheable_request(longer(shared, 13, 1), 6, 1);
    const Request b = cacheable_request(longer(shared, 11, 2), 6, 2);
    const Request c = cacheable_request(random_tokens(30, 9), 6, 3);
    for (const Request* request : {&a, &b, &a, &c, &b, &a}) {
      EXPECT_TRUE(same_output(run_one(*engine, *request), expected_output(rig, *request)));
    }
    // All at once, cold and then warm.
    ASSERT_TRUE(engine->flush_cache().ok());
    expect_all_as_alone(rig, *engine, {a, b, c, a, a, b});
    expect_all_as_alone(rig, *engine, {b, a, c, a, a, b});
    EXPECT_GT(engine->stats().prefix.num_hits, 7);
  }
}

TEST(PrefixCache, ABranchIsKeptOnceItIsSeen) {
  Rig rig;
  const auto engine = rig.engine(cached_options());
  const std::vector<std::int32_t> shared = random_tokens(21, 3);
  const auto run = [&](std::uint64_t key) {
    const Request request = cacheable_request(longer(shared, 20, key), 3, key);
    const RequestOutput output = run_one(*engine, request);
    EXPECT_TRUE(same_output(output, expected_output(rig, request)));
    return output.cached_tokens;
  };
  EXPECT_EQ(run(1), 0);
  EXPECT_EQ(run(2), 0);  // 16 rows are there, but no state; now it leaves one
  EXPECT_EQ(engine->stats().prefix.kv_tokens, 16);
  EXPECT_EQ(engine->stats().prefix.state_tokens, 0);
  EXPECT_EQ(run(3), 16);
  EXPECT_EQ(run(4), 16);
  EXPECT_EQ(engine->stats().prefix.kv_tokens, 48);
  EXPECT_EQ(engine->stats().prefix.state_tokens, 32);
  EXPECT_EQ(engine->stats().prefix.num_lookups, 4);
  EXPECT_EQ(engine->stats().prefix.num_hits, 2);
}

TEST(PrefixCache, TheNextTurnResumesInsideTheResponse) {
  for (std::int64_t new_tokens = 1; new_tokens <= 20; ++new_tokens) {
    SCOPED_TRACE(fmt::format("{} new tokens", new_tokens));
    Rig rig;
    const auto engine = rig.engine(cached_options());
    const Request first = cacheable_request(random_tokens(13, 1), new_tokens, 1);
    const RequestOutput output = run_one(*engine, first);
    std::vector<std::int32_t> prompt = first.prompt;
    prompt.insert(prompt.end(), output.tokens.begin(), output.tokens.end());
    const Request next = cacheable_request(longer(prompt, 6, 2), 4, 2);
    const RequestOutput second = run_one(*engine, next);
    EXPECT_TRUE(same_output(second, expected_output(rig, next)));
    // The last token was sampled, but never fed.
    EXPECT_EQ(second.cached_tokens, grid_below(13 + new_tokens - 1, 8));
  }
}

TEST(PrefixCache, GivesWayBeforeAnyoneIsPreempted) {
  Rig rig;
  EngineOptions options = cached_options();
  options.num_pages = 40;
  options.num_checkpoint_slots = 100;
  const auto engine = rig.engine(options);
  for (std::uint64_t i = 0; i < 30; ++i) {
    const Request request = cacheable_request(random_tokens(40, 20 + i % 7), 20, i);
    EXPECT_TRUE(same_output(run_one(*engine, request), expected_output(rig, request)));
  }
  EXPECT_EQ(engine->stats().num_preemptions, 0);
  EXPECT_GT(engine->stats().num_evicted_pages, 40);
  EXPECT_GT(engine->stats().num_cached_pages, 0);
  expect_idle_and_empty(*engine);
}

TEST(PrefixCache, AnyNumberOfCheckpointSlots) {
  for (const std::int64_t slots : {1, 2, 3, 7}) {
    Rig rig;
    EngineOptions options = cached_options();
    options.num_checkpoint_slots = slots;
    options.num_pages = 30;
    const auto engine = rig.engine(options);
    const std::vector<std::int32_t> shared = random_tokens(17, 3);
    std::vector<Request> requests;
    for (std::uint64_t i = 0; i < 12; ++i) {
      requests.push_back(cacheable_request(
          longer(shared, 1 + static_cast<std::int64_t>(i * 5) % 23, i % 4), 12, i));
    }
    expect_all_as_alone(rig, *engine, requests);
    expect_all_as_alone(rig, *engine, requests);
    EXPECT_GT(engine->stats().prefix.num_hits, 0);
    EXPECT_GT(engine->stats().num_evicted_checkpoints, 0);
    EXPECT_LE(engine->stats().num_checkpoints, slots);
  }
}

TEST(PrefixCache, AHitKeepsWhatItFound) {
  Rig rig;
  EngineOptions options = cached_options();
  options.num_checkpoint_slots = 2;
  const auto engine = rig.engine(options);
  const auto cached = [&](std::uint64_t key) {
    return run_one(*engine, cacheable_request(random_tokens(10, key), 1)).cached_tokens;
  };
  EXPECT_EQ(cached(1), 0);
  EXPECT_EQ(cached(2), 0);
  EXPECT_EQ(cached(1), 8);
  EXPECT_EQ(cached(3), 0);  // in the place of the second
  EXPECT_EQ(cached(1), 8);
  EXPECT_EQ(cached(2), 0);
}

TEST(PrefixCache, NewWeightsFindNothing) {
  Rig rig;
  const auto engine = rig.engine(cached_options());
  const Request request = cacheable_request(random_tokens(30, 1), 10, 1);
  run_one(*engine, request);
  EXPECT_EQ(run_one(*engine, request).cached_tokens, 24);
  const RequestId running = engine->submit(request).value_or_throw();
  engine->step();
  engine->step();
  rig.model.weights = 99;
  engine->on_weights_changed();
  engine->check_integrity();
  EXPECT_EQ(engine->stats().num_cached_pages, 0);
  engine->run_until_idle();
  EXPECT_TRUE(engine->take_output(running).ok());
  const std::int64_t hits = engine->stats().prefix.num_hits;
  rig.model.weights = 100;
  engine->on_weights_changed(0);  // the same number again: still not the same weights
  const RequestOutput output = run_one(*engine, request);
  EXPECT_EQ(output.cached_tokens, 0);
  EXPECT_EQ(engine->stats().prefix.num_hits, hits);
  EXPECT_TRUE(same_output(output, expected_output(rig, request)));
  EXPECT_EQ(run_one(*engine, request).cached_tokens, 24);
}

TEST(PrefixCache, SaltsDoNotShare) {
  Rig rig;
  const auto engine = rig.engine(cached_options());
  Request request = cacheable_request(random_tokens(30, 1), 4, 1);
  for (const char* salt : {"", "alice", "bob"}) {
    request.cache_salt = salt;
    EXPECT_EQ(run_one(*engine, request).cached_tokens, 0) << salt;
    EXPECT_EQ(run_one(*engine, request).cached_tokens, 24) << salt;
  }
}

TEST(PrefixCache, OffMeansOff) {
  Rig rig;
  EngineOptions options = cached_options();
  EXPECT_EQ(plan_memory(rig.model, options).value_or_throw().num_checkpoint_slots, 12);
  options.prefix_cache = false;
  options.num_checkpoint_slots = 5;
  EXPECT_EQ(plan_memory(rig.model, options).value_or_throw().num_checkpoint_slots, 0);
  const auto engine = rig.engine(options);
  const Request request = cacheable_request(random_tokens(30, 1), 4, 1);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(run_one(*engine, request).cached_tokens, 0);
  }
  EXPECT_EQ(engine->stats().num_free_pages, engine->memory_plan().num_pages);
  EXPECT_EQ(engine->stats().prefix.num_hits, 0);
}

TEST(PrefixCache, WhatMustBeComputedIsNotTakenFromIt) {
  Rig rig;
  const auto engine = rig.engine(cached_options());
  Request request = cacheable_request(random_tokens(34, 1), 4, 1);
  run_one(*engine, cacheable_request(request.prompt, 1, 1));
  run_one(*engine, cacheable_request(
                       std::vector(request.prompt.begin(), request.prompt.begin() + 17), 1, 1));
  for (const auto& [from, cached] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {-1, 32}, {34, 32}, {33, 32}, {32, 16}, {17, 16}, {16, 0}, {1, 0}, {0, 0}}) {
    request.prompt_logprobs_from = from;
    EXPECT_EQ(run_one(*engine, request).cached_tokens, cached) << from;
  }
  request.prompt_logprobs_from = -1;
  request.want_routed_experts = true;
  const RequestOutput output = run_one(*engine, request);
  EXPECT_EQ(output.cached_tokens, 0);
  EXPECT_TRUE(same_output(output, expected_output(rig, request)));
}

TEST(PrefixCache, NothingFromNonFiniteLogitsIsKept) {
  Rig rig;
  rig.model.nan_after_token = 17;
  const auto engine = rig.engine(cached_options());
  Request request = cacheable_request(random_tokens(30, 1), 4, 1);
  std::ranges::replace(request.prompt, 17, 18);
  request.prompt.back() = 17;
  EXPECT_EQ(run_one(*engine, request).finish_reason, FinishReason::kError);
  EXPECT_EQ(engine->stats().num_cached_pages, 0);
  // Later on in a response: the prompt was sound, what followed is not kept.
  int errors = 0;
  for (std::uint64_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(engine->flush_cache().ok());
    request = cacheable_request(random_tokens(9, 1), 60, i);
    request.prompt.back() = 3;
    const RequestOutput output = run_one(*engine, request);
    if (output.finish_reason == FinishReason::kError && output.tokens.size() > 1) {
      ++errors;
      EXPECT_EQ(engine->stats().num_checkpoints, 1);
      EXPECT_EQ(engine->stats().num_cached_pages, 2);
    }
  }
  EXPECT_GT(errors, 5);
  expect_idle_and_empty(*engine);
}

TEST(PrefixCache, GroupsResumeAndShareTheRest) {
  for (const std::int64_t tail : {1, 7, 8, 9}) {
    Rig rig;
    const auto engine = rig.engine(cached_options());
    const std::vector<std::int32_t> prefix = random_tokens(25, 1);
    run_one(*engine, cacheable_request(prefix, 1));
    const Request request = cacheable_request(longer(prefix, tail, 4), 10, 40);
    const std::int64_t rows = rig.model.num_rows;
    const auto ids = engine->submit_group(request, 5).value_or_throw();
    while (engine->has_work()) {
      engine->step();
      engine->check_integrity();
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
      Request one = request;
      one.sequence_id += i;
      const RequestOutput output = engine->take_output(ids[i]).value_or_throw();
      EXPECT_TRUE(same_output(output, expected_output(rig, one))) << i;
      EXPECT_EQ(output.cached_tokens, i == 0 ? 24 : 0);
    }
    EXPECT_EQ(engine->stats().num_forks, 4);
    EXPECT_EQ(rig.model.num_rows - rows, 1 + tail + 5 * 9);
    expect_idle_and_empty(*engine);
  }
}

TEST(PrefixCache, AbortsLeaveNothingBehindInAnyState) {
  for (const bool warm : {false, true}) {
    for (int steps = 0; steps < 16; ++steps) {
      Rig rig;
      EngineOptions options = cached_options();
      options.max_batch_tokens = 6;
      const auto engine = rig.engine(options);
      const Request request = cacheable_request(random_tokens(27, 1), 9, 1);
      if (warm) {
        run_one(*engine, cacheable_request(random_tokens(27, 1), 1, 2));
      }
      const RequestId id = engine->submit(request).value_or_throw();
      const RequestId other = engine->submit(request).value_or_throw();
      for (int i = 0; i < steps; ++i) {
        engine->step();
      }
      engine->abort(id);
      engine->check_integrity();
      engine->run_until_idle();
      EXPECT_TRUE(
          same_output(engine->take_output(other).value_or_throw(), expected_output(rig, request)));
      expect_idle_and_empty(*engine);
      ASSERT_TRUE(engine->flush_cache().ok());
      EXPECT_EQ(engine->stats().num_free_pages, engine->memory_plan().num_pages);
    }
  }
}

TEST(PrefixCache, PreemptedSequencesResumeOnTheirOwnCheckpoints) {
  Rig rig;
  const auto engine = rig.engine(cached_options());
  const Request request = cacheable_request(random_tokens(41, 1), 20, 1);
  const RequestId id = engine->submit(request).value_or_throw();
  while (engine->stats().decode_tokens < 10) {
    engine->step();
  }
  const std::int64_t computed = engine->stats().prefill_tokens;
  EXPECT_EQ(computed, 41);
  engine->preempt_all();
  engine->check_integrity();
  engine->run_until_idle();
  const RequestOutput output = engine->take_output(id).value_or_throw();
  EXPECT_TRUE(same_output(output, expected_output(rig, request)));
  EXPECT_EQ(output.num_preemptions, 1);
  EXPECT_EQ(output.cached_tokens, 0);  // what it was given when it first ran
  EXPECT_EQ(engine->stats().prefill_tokens - computed, 41 + 11 - 48);
}

TEST(PrefixCache, AFailedStepLosesNothing) {
  Rig rig;
  const auto engine = rig.engine(cached_options());
  std::vector<Request> requests;
  for (std::uint64_t i = 0; i < 5; ++i) {
    requests.push_back(cacheable_request(longer(random_tokens(18, 1), 7, i), 12, i));
  }
  std::vector<RequestId> ids = submit_all(*engine, requests);
  rig.model.throw_at_call = 1;
  while (engine->has_work()) {
    try {
      engine->step();
    } catch (const std::runtime_error&) {
      engine->check_integrity();
      rig.model.throw_at_call = rig.model.num_calls + 5;
    }
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_TRUE(same_output(engine->take_output(ids[i]).value_or_throw(),
                            expected_output(rig, requests[i])));
  }
  expect_idle_and_empty(*engine);
}

TEST(PrefixCache, IsEmptiedOnRequestUnlessInUse) {
  Rig rig;
  const auto engine = rig.engine(cached_options());
  const Request request = cacheable_request(random_tokens(30, 1), 4, 1);
  run_one(*engine, request);
  const RequestId id = engine->submit(request).value_or_throw();
  EXPECT_TRUE(engine->flush_cache().ok());  // one that waits holds nothing
  engine->step();
  EXPECT_THAT(engine->flush_cache().message(), HasSubstr("1 requests are running"));
  engine->run_until_idle();
  EXPECT_EQ(engine->take_output(id).value_or_throw().cached_tokens, 0);
  EXPECT_TRUE(engine->flush_cache().ok());
  EXPECT_EQ(engine->stats().num_free_pages, engine->memory_plan().num_pages);
  EXPECT_EQ(engine->stats().num_checkpoints, 0);
}

// Checkpoints of a long prompt lie 2, 6, 14, 30 blocks before its last one.
TEST(PrefixCache, SharingAnyLengthOfALongPromptResumesNearItsEnd) {
  Rig rig;
  EngineOptions options = cached_options();
  options.max_seq_len = 240;
  options.checkpoint_tokens = 4;
  options.num_checkpoint_slots = 40;
  for (const auto& [shared, cached] : {std::pair{199, 196}, {195, 188}, {187, 172}, {170, 140}}) {
    SCOPED_TRACE(shared);
    const auto engine = rig.engine(options);
    const std::vector<std::int32_t> prompt = random_tokens(200, 3);
    run_one(*engine, cacheable_request(prompt, 1));
    const std::vector<std::int32_t> prefix(prompt.begin(), prompt.begin() + shared);
    const Request request = cacheable_request(longer(prefix, 10, 1), 2, 1);
    const RequestOutput output = run_one(*engine, request);
    EXPECT_TRUE(same_output(output, expected_output(rig, request)));
    EXPECT_EQ(output.cached_tokens, cached);
    expect_idle_and_empty(*engine);
  }
}

TEST(PrefixCache, TheGridIsAMultipleOfThePage) {
  EngineOptions options;
  EXPECT_EQ(options.checkpoint_grid(), 16);
  options.page_size = 10;
  EXPECT_EQ(options.checkpoint_grid(), 20);
  options.checkpoint_tokens = 64;
  EXPECT_THAT(options.validate().message(),
              HasSubstr("checkpoint_tokens is 64: expected a multiple of page_size 10"));
}

TEST(PrefixCache, CheckpointsTakeTheirShareOfTheMemory) {
  FakeModel model;
  EngineOptions options = cached_options();
  const MemoryPlan plan = plan_memory(model, options).value_or_throw();
  EXPECT_EQ(plan.num_checkpoint_slots, 12);  // two a seat
  EXPECT_THAT(plan.to_string(), HasSubstr("12 slots: prefixes of a multiple of 8 tokens"));
  options.prefix_cache = false;
  EXPECT_EQ(plan.total_bytes() - plan_memory(model, options).value_or_throw().total_bytes(),
            12 * plan.slot_bytes);
  options.prefix_cache = true;
  options.cache_bytes = 6 * plan.slot_bytes + 24 * plan.page_bytes;  // just one sequence
  EXPECT_EQ(plan_memory(model, options).value_or_throw().num_checkpoint_slots, 0);
  options.cache_bytes += 2 * plan.slot_bytes;
  EXPECT_EQ(plan_memory(model, options).value_or_throw().num_checkpoint_slots, 2);
  options.num_checkpoint_slots = 3;
  EXPECT_THAT(plan_memory(model, options).message(), HasSubstr("at least 24 pages"));
}

}  // namespace
}  // namespace tandem::test
