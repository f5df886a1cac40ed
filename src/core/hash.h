// hash.h — a 64-bit hash of bytes: tells files and records apart and finds damage. Some 7 GB/s
// on one core, the same on every machine of one byte order, and no protection against somebody who
// wants two inputs to collide.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tandem {

/// Depends on every byte, on their number and on `seed`. Inputs of one length that differ in
/// nothing but one aligned 8-byte word never have the same hash, but by chance (2^-64).
[[nodiscard]] std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::uint64_t seed = 0);

}  // namespace tandem
