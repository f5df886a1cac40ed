// allocation_test.cpp — a warmed-up step takes no memory from the heap: every operator new of this
// executable is counted.
#include <atomic>
#include <cstdlib>
#include <new>

#include "engine_rig.h"

namespace {
std::atomic<std::int64_t> num_allocations{0};
}  // namespace

// g++ 12 inlines one of the pair below at low optimisation levels and then takes the other for a
// mismatch.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(std::size_t bytes) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) {
    return memory;
  }
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace tandem::test {
namespace {

TEST(Allocation, StepsTakeNoMemory) {
  Rig rig;
  rig.model.check_batches = false;  // the checks themselves use sets
  const auto engine = rig.engine(small_options());
  ASSERT_TRUE(engine->submit(make_request(5, 3)).ok());
  engine->run_until_idle();  // warm-up: the arena gets its block
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(engine->submit(make_request(5, 20 + static_cast<std::int64_t>(i), i)).ok());
  }
  // Everything is reserved at submit: neither prefill nor decode nor finishing takes anything. No
  // assertion before the last reading, as a failing one allocates.
  const std::int64_t before = num_allocations.load();
  engine->run_until_idle();
  const std::int64_t after = num_allocations.load();
  const auto counted = std::make_unique<int>(1);
  const std::int64_t after_one = num_allocations.load();
  EXPECT_EQ(after, before);
  EXPECT_EQ(after_one, after + *counted);  // the counter counts
  EXPECT_GT(engine->stats().decode_tokens, 100);
}

TEST(Allocation, NorDoThoseThatFillUseAndEmptyThePrefixCache) {
  Rig rig;
  rig.model.check_batches = false;
  EngineOptions options = cached_options();
  options.max_running_seqs = 2;
  options.num_pages = 80;
  const auto engine = rig.engine(options);
  ASSERT_TRUE(engine->submit(make_request(5, 3)).ok());
  engine->run_until_idle();
  for (std::uint64_t i = 0; i < 40; ++i) {
    Request request = cacheable_request(longer(random_tokens(30, i % 2), 9, i % 11), 12, i);
    request.cache_salt = std::string(40 * (i % 2), 's');
    ASSERT_TRUE(engine->submit(request).ok());
  }
  const std::int64_t before = num_allocations.load();
  engine->run_until_idle();
  const std::int64_t after = num_allocations.load();
  EXPECT_EQ(after, before);
  EXPECT_GT(engine->stats().prefix.num_hits, 5);
  EXPECT_GT(engine->stats().num_evicted_pages, 20);
}

TEST(Allocation, NorDoRulesAndPromptScores) {
  Rig rig;
  rig.model.check_batches = false;
  const auto engine = rig.engine(small_options());
  const auto submit_all = [&] {
    for (std::uint64_t i = 0; i < 5; ++i) {
      Request request = make_request(5, 20 + static_cast<std::int64_t>(i), i);
      request.rules = {.repetition_penalty = 1.2F,
                       .frequency_penalty = 0.5F,
                       .logit_bias = {{3, 1.0F}, {4, 2.0F}},
                       .min_new_tokens = 10};
      request.stop_ids = {1, 2};
      request.constraint = std::make_shared<FakeConstraint>(i);
      request.prompt_logprobs_from = 0;
      ASSERT_TRUE(engine->submit(request).ok());
    }
  };
  submit_all();
  engine->run_until_idle();
  submit_all();
  const std::int64_t before = num_allocations.load();
  engine->run_until_idle();
  EXPECT_EQ(num_allocations.load(), before);
}

}  // namespace
}  // namespace tandem::test
