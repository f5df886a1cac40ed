// interrupts.h — Ctrl-C and SIGTERM without a signal handler: the signals are blocked everywhere
// and one thread waits for them, so no global state is needed and messages may be printed.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>

namespace tandem::cli {

/// Exit code of a process that Ctrl-C ended: 128 + SIGINT, as shells expect. SIGTERM gives it too.
inline constexpr int kInterruptedCode = 130;

class Interrupts {
 public:
  /// Blocks SIGINT and SIGTERM for this thread and all that it starts later; ignores SIGPIPE and
  /// SIGXFSZ, whose write() calls then report what happened. To be made before any other thread.
  /// Until a Graceful scope exists, the first signal ends the process with 128 + its number.
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  /// While one exists, the first signal prints `message` and sets stop(); the second ends the
  /// process at once.
  class Graceful {
   public:
    Graceful(Interrupts& interrupts, std::string message);
    ~Graceful();
    Graceful(const Graceful&) = delete;
    Graceful& operator=(const Graceful&) = delete;

   private:
    Interrupts& interrupts_;
  };

  /// Set by a signal inside a Graceful scope; cleared when the next one begins.
  [[nodiscard]] const std::atomic<bool>& stop() const { return stop_; }

 private:
  void wait_for_signals();

  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards is_graceful_ and message_
  bool is_graceful_ = false;
  std::string message_;
  std::atomic<bool> end_{false};
  std::thread thread_;
};

}  // namespace tandem::cli
