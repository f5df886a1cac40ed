// equality_test.cpp — a request gives the same tokens, log-probabilities and experts, bit for bit,
// alone and in any batch, chunking, paging, preemption or grouping.
#include "engine_rig.h"

namespace tandem::test {
namespace {

TEST(FakeModel, NoticesEveryKindOfWrongCache) {
  Rig rig;
  CacheManager cache(rig.model.cache_spec(), 4, 2, 2);
  SeqCache seq;
  const std::vector<std::int32_t> tokens{5, 6, 7};
  const auto logits_of_last = [&](const auto& spoil) {
    cache.release(seq);
    TDM_CHECK(cache.open(seq, 3));
    std::vector<float> logits(usize(FakeModel::kVocab));
    BatchBuilder builder(3, 1, 2, host_device());
    Sequence sequence;
    for (std::int64_t begin = 0; begin < 3; ++begin) {
      sequence.all_tokens.assign(tokens.begin(), tokens.begin() + begin + 1);
      sequence.cache = seq;
      if (begin == 2) {
        spoil(sequence.cache);
      }
      const ScheduledChunk chunk{&sequence, begin, 1};
      rig.model.forward(rig.ctx, {logits.data(), {1, FakeModel::kVocab}},
                        builder.build({&chunk, 1}, cache), cache.buffers(), nullptr);
    }
    return logits;
  };
  const std::vector<float> expected = rig.model.expected_logits(tokens);
  EXPECT_EQ(logits_of_last([](SeqCache&) {}), expected);
  EXPECT_NE(logits_of_last([](SeqCache& c) { c.slot = SlotId{1}; }), expected);
  EXPECT_NE(logits_of_last([](SeqCache& c) { c.pages[0] = PageId{3}; }), expected);
  EXPECT_NE(logits_of_last([&](SeqCache&) { cache.buffers().state_layers[1].conv.data()[0] = 0; }),
            expected);
  EXPECT_NE(
      logits_of_last([&](SeqCache&) { cache.buffers().latent_layers[1].data[0] ^= std::byte{1}; }),
      expected);
  cache.release(seq);
}

/// Every sample of a group as if submitted alone with its own sequence id.
void expect_group_as_alone(Rig& rig, Engine& engine, const Request& request, std::int64_t n) {
  const std::vector<RequestId> ids = engine.submit_group(request, n).value_or_throw();
  ASSERT_EQ(isize(ids), n);
  while (engine.has_work()) {
    engine.step();
    engine.check_integrity();
  }
  for (std::int64_t i = 0; i < n; ++i) {
    Request alone = request;
    alone.sequence_id += static_cast<std::uint64_t>(i);
    EXPECT_TRUE(same_output(engine.take_output(ids[usize(i)]).value_or_throw(),
                            expected_output(rig, alone)))
        << "sample " << i;
  }
  expect_idle_and_empty(engine);
}

TEST(Equality, OneRequestAlone) {
  for (const Request& request : mixed_requests(8)) {
    Rig rig;
    const auto engine = rig.engine(small_options());
    expect_all_as_alone(rig, *engine, {request});
  }
}

TEST(Equality, AnyCacheFormat) {
  for (const LatentFormat format : {LatentFormat::kF32, LatentFormat::kBF16, LatentFormat::kFp8}) {
    Rig rig;
    EngineOptions options = small_options();
    options.kv_cache_dtype = format;
    options.max_seq_len = 32;
    options.num_pages = 10;  // one longest sequence and a little
    const auto engine = rig.engine(options);
    std::vector<Request> requests;
    for (std::uint64_t i = 0; i < 10; ++i) {
      requests.push_back(make_request(3 + static_cast<std::int64_t>(i % 4), 20, i));
    }
    expect_all_as_alone(rig, *engine, requests);
    EXPECT_GT(engine->stats().num_preemptions, 3);
    expect_group_as_alone(rig, *engine, make_request(7, 12, 5), 4);
  }
}

TEST(Equality, AnyPageSizeAndBudget) {
  for (const std::int64_t page_size : {1, 3, 16}) {
    for (const std::int64_t budget : {1, 2, 3, 7, 64}) {
      SCOPED_TRACE(fmt::format("page_size {} max_batch_tokens {}", page_size, budget));
      Rig rig;
      EngineOptions options = small_options();
      options.page_size = page_size;
      options.max_batch_tokens = budget;
      const auto engine = rig.engine(options);
      expect_all_as_alone(rig, *engine, mixed_requests(12));
      EXPECT_LE(rig.model.most_rows, budget);
      EXPECT_EQ(engine->stats().num_preemptions, 0);  // the default cache holds every seat
    }
  }
}

TEST(Equality, FewSlotsOrSeats) {
  for (const std::int64_t seats : {1, 2, 5}) {
    Rig rig;
    EngineOptions options = small_options();
    options.num_state_slots = seats;
    const auto by_slots = rig.engine(options);
    expect_all_as_alone(rig, *by_slots, mixed_requests(9));
    options.num_state_slots = 0;
    options.max_running_seqs = seats;
    const auto by_seats = rig.engine(options);
    expect_all_as_alone(rig, *by_seats, mixed_requests(9));
  }
}

TEST(Equality, PreemptedForLackOfPages) {
  for (const std::int64_t page_size : {1, 4}) {
    Rig rig;
    EngineOptions options = small_options();
    options.max_seq_len = 32;
    options.page_size = page_size;
    options.num_pages = 40 / page_size;  // one longest sequence and a little
    const auto engine = rig.engine(options);
    std::vector<Request> requests;
    for (std::uint64_t i = 0; i < 10; ++i) {
      requests.push_back(make_request(3 + static_cast<std::int64_t>(i % 4), 20, i));
    }
    expect_all_as_alone(rig, *engine, requests);
    EXPECT_GT(engine->stats().num_preemptions, 3);
  }
}

TEST(Equality, PreemptedAtEveryStep) {
  for (std::int64_t every = 2; every <= 5; ++every) {
    Rig rig;
    EngineOptions options = small_options();
    options.max_batch_tokens = 40;  // a sequence must be able to advance between two preemptions
    const auto engine = rig.engine(options);
    const std::vector<Request> requests = mixed_requests(6);
    std::vector<RequestId> ids = submit_all(*engine, requests);
    for (std::int64_t step = 1; engine->has_work(); ++step) {
      engine->step();
      if (step % every == 0) {
        engine->preempt_all();
        engine->check_integrity();
        EXPECT_EQ(engine->stats().num_free_slots, engine->memory_plan().num_slots);
      }
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const RequestOutput output = engine->take_output(ids[i]).value_or_throw();
      EXPECT_TRUE(same_output(output, expected_output(rig, requests[i]))) << "request " << i;
      if (output.tokens.size() > usize(every)) {
        EXPECT_GT(output.num_preemptions, 0);
      }
    }
    expect_idle_and_empty(*engine);
  }
}

TEST(Equality, ArrivalOrderDoesNotMatter) {
  Rig rig;
  const std::vector<Request> requests = mixed_requests(10);
  std::vector<Request> reversed(requests.rbegin(), requests.rend());
  const auto engine = rig.engine(small_options());
  expect_all_as_alone(rig, *engine, reversed);
  // Late arrivals join sequences that are under way.
  std::vector<RequestId> ids;
  for (const Request& request : requests) {
    ids.push_back(engine->submit(request).value_or_throw());
    engine->step();
    engine->step();
  }
  engine->run_until_idle();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    EXPECT_TRUE(same_output(engine->take_output(ids[i]).value_or_throw(),
                            expected_output(rig, requests[i])));
  }
}

TEST(Equality, AResponseResumedAsALongerPromptGoesOnAsIfUndisturbed) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  const Request whole = make_request(7, 12, 5);
  const RequestOutput expected = expected_output(rig, whole);
  Request rest = whole;
  rest.prompt.insert(rest.prompt.end(), expected.tokens.begin(), expected.tokens.begin() + 5);
  rest.max_new_tokens = 7;
  const RequestId id = engine->submit(rest).value_or_throw();
  engine->run_until_idle();
  const RequestOutput output = engine->take_output(id).value_or_throw();
  EXPECT_EQ(output.tokens,
            std::vector<std::int32_t>(expected.tokens.begin() + 5, expected.tokens.end()));
}

TEST(Equality, GroupsForkAtEveryPromptLength) {
  for (std::int64_t prompt_size = 1; prompt_size <= 13; ++prompt_size) {
    SCOPED_TRACE(fmt::format("prompt of {}", prompt_size));
    Rig rig;
    const auto engine = rig.engine(small_options());
    expect_group_as_alone(rig, *engine, make_request(prompt_size, 9, 100), 5);
    EXPECT_EQ(engine->stats().num_forks, 4);
    EXPECT_EQ(engine->stats().prefill_tokens, prompt_size);  // the prompt was computed once
  }
}

TEST(Equality, GroupsLargerThanTheSeats) {
  for (const std::int64_t budget : {3, 5, 32}) {
    Rig rig;
    EngineOptions options = small_options();
    options.max_running_seqs = 3;
    options.max_batch_tokens = budget;
    const auto engine = rig.engine(options);
    expect_group_as_alone(rig, *engine, make_request(10, 6, 3), 8);
    EXPECT_GT(engine->stats().num_forks, 0);
  }
}

TEST(Equality, GroupsUnderPagePressure) {
  for (const std::int64_t page_size : {1, 3}) {
    Rig rig;
    EngineOptions options = small_options();
    options.max_seq_len = 30;
    options.page_size = page_size;
    options.num_pages = 48 / page_size;
    const auto engine = rig.engine(options);
    expect_group_as_alone(rig, *engine, make_request(10, 20, 3), 7);
    EXPECT_GT(engine->stats().num_preemptions, 0);
  }
}

TEST(Equality, GroupWhosePromptIsComputedInChunks) {
  Rig rig;
  EngineOptions options = small_options();
  options.max_batch_tokens = 4;
  const auto engine = rig.engine(options);
  expect_group_as_alone(rig, *engine, make_request(19, 5, 1), 4);
  EXPECT_EQ(engine->stats().prefill_tokens, 19);
}

TEST(Equality, AbortedLeaderHandsItsPromptOn) {
  for (int steps = 1; steps <= 5; ++steps) {
    Rig rig;
    EngineOptions options = small_options();
    options.max_batch_tokens = 4;
    const auto engine = rig.engine(options);
    const Request request = make_request(18, 4, 50);
    const std::vector<RequestId> ids = engine->submit_group(request, 4).value_or_throw();
    for (int i = 0; i < steps; ++i) {
      engine->step();
    }
    EXPECT_TRUE(engine->abort(ids[0]));
    engine->check_integrity();
    engine->run_until_idle();
    for (std::size_t i = 1; i < ids.size(); ++i) {
      Request alone = request;
      alone.sequence_id += i;
      EXPECT_TRUE(
          same_output(engine->take_output(ids[i]).value_or_throw(), expected_output(rig, alone)));
    }
    EXPECT_EQ(engine->stats().prefill_tokens, 18);  // nothing was computed twice
    expect_idle_and_empty(*engine);
  }
}

}  // namespace
}  // namespace tandem::test
