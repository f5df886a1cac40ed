#include "cli/interrupts.h"

#include <csignal>
#include <cstdio>
#include <utility>

#include <pthread.h>
#include <unistd.h>

namespace tandem::cli {
namespace {

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

/// Leaves without destructors: another thread is in the middle of something. Files are only ever
/// renamed into place or committed, so nothing half-written stays.
[[noreturn]] void leave() {
  if (::isatty(STDERR_FILENO) != 0) {
    std::fputs("\r\x1b[K", stderr);
  }
  ::_exit(kInterruptedCode);
}

}  // namespace

Interrupts::Interrupts() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit is then an error of write(), like a full disk
  const sigset_t set = stop_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::thread([this] { wait_for_signals(); });
}

Interrupts::~Interrupts() {
  end_ = true;
  pthread_kill(thread_.native_handle(), SIGTERM);  // wakes the wait; end_ tells why
  thread_.join();
}

void Interrupts::wait_for_signals() {
  const sigset_t set = stop_signals();
  for (;;) {
    int signal = 0;
    if (sigwait(&set, &signal) != 0) {
      continue;
    }
    if (end_) {
      return;
    }
    const std::lock_guard lock(mutex_);
    if (!is_graceful_ || stop_) {
      leave();
    }
    stop_ = true;
    const char* erase = ::isatty(STDERR_FILENO) != 0 ? "\r\x1b[K" : "";
    std::fprintf(stderr, "%s%s\n", erase, message_.c_str());
  }
}

Interrupts::Graceful::Graceful(Interrupts& interrupts, std::string message)
    : interrupts_(interrupts) {
  const std::lock_guard lock(interrupts_.mutex_);
  interrupts_.stop_ = false;
  interrupts_.is_graceful_ = true;
  interrupts_.message_ = std::move(message);
}

Interrupts::Graceful::~Graceful() {
  const std::lock_guard lock(interrupts_.mutex_);
  interrupts_.is_graceful_ = false;
}

}  // namespace tandem::cli
