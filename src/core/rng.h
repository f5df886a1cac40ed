// rng.h — counter-based random numbers: every draw is a pure function of (key, counter), so no
// result depends on the order of arrival, the thread, or the batch. The generator is Philox 4x32-10
// (Salmon et al., SC'11).
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

namespace tandem {

__extension__ using Uint128 = unsigned __int128;

/// Four 32-bit words for one counter under one key.
[[nodiscard]] constexpr std::array<std::uint32_t, 4> philox4x32(std::uint64_t key,
                                                                std::uint64_t counter_hi,
                                                                std::uint64_t counter_lo) {
  std::array<std::uint32_t, 4> c{
      static_cast<std::uint32_t>(counter_lo), static_cast<std::uint32_t>(counter_lo >> 32),
      static_cast<std::uint32_t>(counter_hi), static_cast<std::uint32_t>(counter_hi >> 32)};
  std::uint32_t k0 = static_cast<std::uint32_t>(key);
  std::uint32_t k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * c[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57U} * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(p0)};
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return c;
}

/// Mixes several integers into one key: (seed, rollout id, prompt index, sample index, ...).
[[nodiscard]] constexpr std::uint64_t mix_key(std::initializer_list<std::uint64_t> parts) {
  std::uint64_t h = 0x243F6A8885A308D3ULL;
  for (const std::uint64_t part : parts) {
    h ^= part + 0x9E3779B97F4A7C15ULL + (h << 6) + (h >> 2);
    h ^= h >> 30;
    h *= 0xBF58476D1CE4E5B9ULL;
    h ^= h >> 27;
    h *= 0x94D049BB133111EBULL;
    h ^= h >> 31;
  }
  return h;
}

/// A key with a running counter, for code that draws many numbers in a fixed order.
class Rng {
 public:
  explicit constexpr Rng(std::uint64_t key) : key_(key) {}

  [[nodiscard]] constexpr std::uint64_t next_u64() {
    const auto words = philox4x32(key_, 0, counter_++);
    return (std::uint64_t{words[1]} << 32) | words[0];
  }
  /// Uniform in [0, 1) with 53 bits.
  [[nodiscard]] constexpr double uniform() {
    return static_cast<double>(next_u64() >> 11) * 0x1.0p-53;
  }
  /// Uniform integer in [0, bound); bound > 0. The bias is below bound / 2^64.
  [[nodiscard]] constexpr std::uint64_t below(std::uint64_t bound) {
    return static_cast<std::uint64_t>((static_cast<Uint128>(next_u64()) * bound) >> 64);
  }
  /// Close to N(0, 1): sum of 12 uniforms minus 6 (Irwin-Hall). Exact arithmetic, so the same on
  /// every machine and libm.
  [[nodiscard]] constexpr double normal() {
    double sum = -6.0;
    for (int i = 0; i < 6; ++i) {
      const std::uint64_t word = next_u64();
      sum += static_cast<double>(word >> 32) * 0x1.0p-32 +
             static_cast<double>(word & 0xFFFFFFFFU) * 0x1.0p-32;
    }
    return sum;
  }

 private:
  std::uint64_t key_;
  std::uint64_t counter_ = 0;
};

}  // namespace tandem
