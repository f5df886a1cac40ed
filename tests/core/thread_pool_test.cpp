#include "core/thread_pool.h"

#include <atomic>
#include <vector>

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(ThreadPool, RunsEveryBlockExactlyOnceOverManyJobs) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int job = 0; job < 2000; ++job) {
      std::vector<std::atomic<int>> hits(static_cast<std::size_t>(1 + job % 17));
      pool.parallel_for(static_cast<std::int64_t>(hits.size()),
                        [&](std::int64_t block, int thread) {
                          ASSERT_LT(thread, pool.num_threads());
                          hits[static_cast<std::size_t>(block)].fetch_add(1);
                        });
      for (const auto& hit : hits) {
        ASSERT_EQ(hit.load(), 1);
      }
    }
  }
}

TEST(ThreadPool, ZeroBlocksIsNothing) {
  ThreadPool pool(2);
  pool.parallel_for(0, [](std::int64_t, int) { FAIL(); });
}

}  // namespace
}  // namespace tandem
