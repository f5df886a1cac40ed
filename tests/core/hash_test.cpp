// Every byte, every position and every length counts.
#include "core/hash.h"

#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(Hash, TellsApartWhatDiffersInOneBitOrInLength) {
  std::set<std::uint64_t> seen;
  std::size_t count = 0;
  for (std::size_t size = 0; size <= 100; ++size) {
    std::vector<std::byte> bytes(size);
    seen.insert(hash_bytes(bytes));
    ++count;
    for (std::size_t bit = 0; bit < size * 8; ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
      seen.insert(hash_bytes(bytes));
      ++count;
      bytes[bit / 8] = {};
    }
  }
  EXPECT_EQ(seen.size(), count);
}

TEST(Hash, TellsApartTwoFlipsAndSwappedWords) {
  // High bits of neighbouring words of a lane, which a plain product would let cancel.
  std::set<std::uint64_t> seen;
  std::size_t count = 0;
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      std::vector<std::uint64_t> words(16);
      words[i] ^= 1ULL << 63;
      words[j] ^= i == j ? 0 : 1ULL << 63;
      seen.insert(hash_bytes(std::as_bytes(std::span(words))));
      ++count;
    }
  }
  EXPECT_EQ(seen.size(), count);
}

TEST(Hash, DependsOnTheSeed) {
  const std::vector<std::byte> bytes(40);
  std::set<std::uint64_t> seen;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    seen.insert(hash_bytes(bytes, seed));
  }
  EXPECT_EQ(seen.size(), 1000U);
}

TEST(Hash, IsTheSameEverywhere) {
  // Files keep it. The number is a Python program's, written from the definition.
  std::vector<std::byte> bytes;
  for (int i = 0; i < 77; ++i) {
    bytes.push_back(static_cast<std::byte>(i));
  }
  EXPECT_EQ(hash_bytes(bytes, 5), 16290540416261657955U);
}

}  // namespace
}  // namespace tandem
