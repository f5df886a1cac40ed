// thread_pool.h — fork-join over fixed blocks of work. Which thread runs a block never changes a
// result: callers cut work by its own size, not by the thread count. The caller works too; idle
// workers sleep on a futex after a bounded spin (100 us), so a machine shared with other work
// slows down in proportion instead of collapsing on spin barriers. A worker that was woken on the
// caller's CPU moves to another one first.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace tandem {

class ThreadPool {
 public:
  /// `num_threads` counts the caller; 0 means one per hardware thread.
  explicit ThreadPool(int num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Runs fn(block, thread) for block = 0..num_blocks-1 and returns when all have ended. `thread` <
  /// num_threads() names the running thread, for per-thread scratch only. fn must not throw and
  /// must not call parallel_for again.
  template <typename Fn>
  void parallel_for(std::int64_t num_blocks, const Fn& fn) {
    if (num_blocks <= 1 || workers_.empty()) {
      for (std::int64_t block = 0; block < num_blocks; ++block) {
        fn(block, 0);
      }
      return;
    }
    run(
        num_blocks,
        [](const void* context, std::int64_t block, int thread) {
          (*static_cast<const Fn*>(context))(block, thread);
        },
        &fn);
  }

 private:
  using BlockFn = void (*)(const void* context, std::int64_t block, int thread);

  void run(std::int64_t num_blocks, BlockFn fn, const void* context);
  void work(int thread);
  void worker_loop(int thread);

  // One job at a time. `gate_` holds kOpen while blocks may still be claimed, plus the number of
  // workers inside; the job fields below are written only while it is 0, so a worker that wakes
  // late finds the gate shut and goes back to sleep.
  static constexpr std::uint32_t kOpen = 1U << 31;
  BlockFn fn_ = nullptr;
  const void* context_ = nullptr;
  std::int64_t num_blocks_ = 0;
  alignas(64) std::atomic<std::uint32_t> job_{0};  // bumped when a job opens; workers wait on it
  alignas(64) std::atomic<std::uint32_t> gate_{0};
  alignas(64) std::atomic<std::int64_t> next_{0};
  std::atomic<int> caller_cpu_{-1};
  std::atomic<bool> stop_{false};
  std::vector<std::jthread> workers_;  // last: its threads use every field above
};

}  // namespace tandem
