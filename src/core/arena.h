// arena.h — bump allocation of a device's memory for activations and workspaces. Memory is taken in
// large blocks, kept, and reused after a rewind, so a warmed-up step allocates nothing. Pointers
// stay valid until the arena is rewound past them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/device.h"

namespace tandem {

class Arena {
 public:
  static constexpr std::size_t kAlignment = 64;  // one cache line, one AVX-512 vector

  explicit Arena(std::size_t block_bytes = std::size_t{4} << 20, Device& device = host_device())
      : device_(&device), block_bytes_(block_bytes) {}
  /// One block of `bytes`, taken now. Errors: throws Error when more is asked for later.
  [[nodiscard]] static Arena fixed(std::size_t bytes, Device& device);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  Arena(Arena&&) noexcept = default;
  Arena& operator=(Arena&&) noexcept = default;
  ~Arena() = default;

  /// `count` uninitialised elements, 64-byte aligned.
  template <typename T>
  [[nodiscard]] std::span<T> take(std::int64_t count) {
    return {static_cast<T*>(take_bytes(static_cast<std::size_t>(count) * sizeof(T))),
            static_cast<std::size_t>(count)};
  }

  /// A position to rewind to.
  struct Mark {
    std::size_t block = 0;
    std::size_t used = 0;
    std::size_t total = 0;
  };
  [[nodiscard]] Mark mark() const { return {current_, used_, total_}; }
  void rewind(Mark mark) {
    current_ = mark.block;
    used_ = mark.used;
    total_ = mark.total;
  }
  void reset() { rewind({}); }
  /// Gives back the blocks in which nothing lies; a fixed one keeps its own.
  void trim();
  [[nodiscard]] std::size_t capacity_bytes() const;
  /// The most that was in use at once: fixed() of it suffices for the same calls.
  [[nodiscard]] std::size_t peak_bytes() const { return peak_; }

 private:
  struct Block {
    DevicePtr data;
    std::size_t bytes = 0;
  };

  void* take_bytes(std::size_t bytes);
  void add_block(std::size_t bytes);

  Device* device_;
  std::size_t block_bytes_;
  std::vector<Block> blocks_;
  std::size_t current_ = 0;  // block
  std::size_t used_ = 0;     // of that block
  std::size_t total_ = 0;    // in use, in all blocks
  std::size_t peak_ = 0;
  bool fixed_ = false;
};

/// Rewinds an arena to where it stood when the scope began.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.rewind(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

}  // namespace tandem
