// worker.h — one thread for what takes long and must hold up neither clients nor the engine:
// compiling grammars, reading checkpoints.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace tandem::server {

class Worker {
 public:
  Worker();
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Tasks run one by one, in order. They do not throw.
  void post(std::function<void()> task);
  /// Waits for the present task; those behind it, and later ones, are dropped.
  void stop();

 private:
  void run();

  std::mutex mutex_;  // guards the two below
  std::deque<std::function<void()>> tasks_;
  bool stop_ = false;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace tandem::server
