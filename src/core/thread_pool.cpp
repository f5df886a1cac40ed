#include "core/thread_pool.h"

#include <algorithm>
#include <chrono>

#include <sched.h>

namespace tandem {
namespace {

// Longer than the serial stretch between two parallel ops of a decode step, shorter than a time
// slice. Measured 2026-12-01 on k3-mini, batch 1, two cores: 47.6 tok/s at 20 us, 73.6 at 100 us;
// waking a sleeping worker costs tens of microseconds.
constexpr auto kSpin = std::chrono::microseconds(100);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/// Waits until `atomic` differs from `value`: a short spin, then a futex.
template <typename T>
void wait_change(const std::atomic<T>& atomic, T value) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (atomic.load(std::memory_order_acquire) != value) {
        return;
      }
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  atomic.wait(value, std::memory_order_acquire);
}

/// Moves the calling thread off `cpu` if it may run elsewhere. Kernels like to wake a thread beside
/// its waker, where it would get a turn only once the waker's time slice is over.
void leave_cpu(int cpu) {
  cpu_set_t allowed;
  if (cpu < 0 || sched_getcpu() != cpu || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return;
  }
  cpu_set_t others = allowed;
  CPU_CLR(static_cast<std::size_t>(cpu), &others);
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof(others), &others) == 0) {
    sched_setaffinity(0, sizeof(allowed), &allowed);
  }
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads <= 0) {
    num_threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { worker_loop(thread); });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_release);
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
}

void ThreadPool::run(std::int64_t num_blocks, BlockFn fn, const void* context) {
  fn_ = fn;
  context_ = context;
  num_blocks_ = num_blocks;
  next_.store(0, std::memory_order_relaxed);
  caller_cpu_.store(sched_getcpu(), std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();

  work(0);

  std::uint32_t inside = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  while (inside != 0) {
    wait_change(gate_, inside);
    inside = gate_.load(std::memory_order_acquire);
  }
}

void ThreadPool::work(int thread) {
  for (;;) {
    const std::int64_t block = next_.fetch_add(1, std::memory_order_relaxed);
    if (block >= num_blocks_) {
      return;
    }
    fn_(context_, block, thread);
  }
}

void ThreadPool::worker_loop(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    wait_change(job_, seen);
    seen = job_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_acquire)) {
      return;
    }
    std::uint32_t gate = gate_.load(std::memory_order_acquire);
    while ((gate & kOpen) != 0 &&
           !gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
    }
    if ((gate & kOpen) == 0) {
      continue;  // the job ended before this worker woke
    }
    leave_cpu(caller_cpu_.load(std::memory_order_relaxed));
    work(thread);
    gate_.fetch_sub(1, std::memory_order_acq_rel);
    gate_.notify_all();
  }
}

}  // namespace tandem
