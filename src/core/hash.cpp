#include "core/hash.h"

#include <array>
#include <cstring>

#include "core/rng.h"

namespace tandem {
namespace {

/// A bijection of `lane` for every word and of `word` for every lane: what differs once stays
/// different. The shift brings high bits down, which a product only carries up.
std::uint64_t absorb(std::uint64_t lane, std::uint64_t word) {
  lane = (lane ^ word) * 0x9E3779B97F4A7C15ULL;
  return lane ^ (lane >> 32);
}

}  // namespace

std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::uint64_t seed) {
  std::array<std::uint64_t, 4> lanes{seed, seed + 1, seed + 2, seed + 3};  // independent chains
  std::array<std::uint64_t, 4> words{};
  const std::size_t size = bytes.size();
  for (; bytes.size() >= sizeof(words); bytes = bytes.subspan(sizeof(words))) {
    std::memcpy(words.data(), bytes.data(), sizeof(words));
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      lanes[i] = absorb(lanes[i], words[i]);
    }
  }
  if (!bytes.empty()) {
    words = {};  // the length below tells these zeros from the input's
    std::memcpy(words.data(), bytes.data(), bytes.size());
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      lanes[i] = absorb(lanes[i], words[i]);
    }
  }
  return mix_key({seed, size, lanes[0], lanes[1], lanes[2], lanes[3]});
}

}  // namespace tandem
