// allocation_test.cpp — a warmed-up step takes no memory from the heap: every operator new of this
// executable is counted.
#include <atomic>
#include <cstdlib>
#include <new>

#include "engine_rig.h"

namespace {
std::atomic<std::int64_t> num_allocations{0};
}  // namespace

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

TEST(Allocation, DecodeAndFinishTakeNoMemory) {
  Rig rig;
  rig.model.check_batches = false;  // the checks themselves use sets
  const auto engine = rig.engine(small_options());
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(engine->submit(make_request(5, 20 + static_cast<std::int64_t>(i), i)).ok());
  }
  const std::int64_t before_prefill = num_allocations.load();
  while (engine->stats().decode_tokens < 5) {
    engine->step();
  }
  const std::int64_t before = num_allocations.load();
  EXPECT_EQ(before_prefill, before);  // nor does prefill: everything is reserved at submit
  engine->run_until_idle();
  EXPECT_EQ(num_allocations.load(), before);
  EXPECT_GT(engine->stats().decode_tokens, 80);
  const auto counted = std::make_unique<int>(1);
  EXPECT_EQ(num_allocations.load(), before + *counted);  // the counter counts
}

}  // namespace
}  // namespace tandem::test
