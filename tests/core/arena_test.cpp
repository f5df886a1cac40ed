// Bump allocation: what a peak promises, and an arena that cannot grow.
#include "core/arena.h"

#include <string>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

/// Pieces of many sizes, scopes in scopes; the pattern repeats with `scale`.
void use(Arena& arena, std::int64_t scale) {
  const ArenaScope outer(arena);
  static_cast<void>(arena.take<float>(10 * scale));
  for (std::int64_t i = 1; i < 9; ++i) {
    const ArenaScope inner(arena);
    static_cast<void>(arena.take<double>(i * scale));
    static_cast<void>(arena.take<char>(100 * scale / i));
  }
  static_cast<void>(arena.take<float>(33 * scale));
}

TEST(Arena, AFixedOneOfThePeakHoldsTheSameCallsAndSmallerOnes) {
  Arena growing(256);
  use(growing, 50);
  EXPECT_GE(growing.capacity_bytes(), growing.peak_bytes());
  Arena fixed = Arena::fixed(growing.peak_bytes(), host_device());
  for (const std::int64_t scale : {50, 49, 7, 1, 50}) {
    use(fixed, scale);
  }
  EXPECT_EQ(fixed.capacity_bytes(), growing.peak_bytes());
  EXPECT_EQ(fixed.peak_bytes(), growing.peak_bytes());
}

TEST(Arena, TrimmedItKeepsWhatIsInUse) {
  Arena arena(256);
  const std::span<std::int32_t> kept = arena.take<std::int32_t>(16);
  kept[15] = 7;
  {
    const ArenaScope scope(arena);
    use(arena, 50);
  }
  EXPECT_GT(arena.capacity_bytes(), 256U);
  arena.trim();
  EXPECT_EQ(arena.capacity_bytes(), 256U);
  EXPECT_EQ(kept[15], 7);
  use(arena, 50);  // grows again
  arena.reset();
  arena.trim();
  EXPECT_EQ(arena.capacity_bytes(), 0U);
  use(arena, 50);

  Arena fixed = Arena::fixed(1024, host_device());
  fixed.trim();
  EXPECT_EQ(fixed.capacity_bytes(), 1024U);
}

TEST(Arena, AFixedOneSaysWhatItLacksAndGoesOn) {
  Arena fixed = Arena::fixed(1024, host_device());
  {
    const ArenaScope scope(fixed);
    static_cast<void>(fixed.take<char>(640));
    try {
      static_cast<void>(fixed.take<char>(448));
      FAIL() << "it grew";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                "workspace: 640 bytes are in use and 448 more are needed, but it has 1024");
    }
  }
  EXPECT_EQ(fixed.take<char>(1024).size(), 1024U);
}

}  // namespace
}  // namespace tandem
