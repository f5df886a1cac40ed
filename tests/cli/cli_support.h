// cli_support.h — runs the built program as people do: arguments in, texts and an exit code out.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/temp_dir.h"

namespace tandem::test {

inline std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_text(const std::string& path, std::string_view text) {
  std::ofstream out(path, std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
}

/// Every file below `dir` with its bytes: "nothing lost" and "nothing left behind".
inline std::vector<std::pair<std::string, std::string>> snapshot(const std::string& dir) {
  std::vector<std::pair<std::string, std::string>> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir)) {
    if (entry.is_regular_file()) {
      files.emplace_back(entry.path().string(), read_text(entry.path().string()));
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

struct Outcome {
  int exit_code = -1;  // -1: ended by a signal
  int signal = 0;
  std::string out;
  std::string err;
};

struct RunSettings {
  std::string input = {};            // standard input
  std::string dir = {};              // working folder; empty: that of the test
  std::string stdout_path = {};      // standard output goes here instead of into Outcome::out
  std::uint64_t max_file_bytes = 0;  // RLIMIT_FSIZE; 0: none
  bool close_stdout_reader = false;  // standard output is a pipe that nobody reads
  std::function<bool()> interrupt_when = {};  // polled; `signal` is sent when it holds
  int signal = SIGINT;
  int num_interrupts = 1;
};

namespace detail {

[[noreturn]] inline void become_tandem(const std::vector<std::string>& args,
                                       const RunSettings& settings, const std::string& scratch) {
  const auto redirect = [](const std::string& path, int flags, int target) {
    const int fd = ::open(path.c_str(), flags, 0600);
    if (fd < 0 || ::dup2(fd, target) < 0) {
      ::_exit(126);
    }
  };
  redirect(scratch + "/in", O_RDONLY, STDIN_FILENO);
  if (settings.close_stdout_reader) {
    int fds[2];
    if (::pipe(fds) != 0 || ::close(fds[0]) != 0 || ::dup2(fds[1], STDOUT_FILENO) < 0) {
      ::_exit(126);
    }
  } else {
    redirect(settings.stdout_path.empty() ? scratch + "/out" : settings.stdout_path,
             O_WRONLY | O_CREAT, STDOUT_FILENO);
  }
  redirect(scratch + "/err", O_WRONLY | O_CREAT, STDERR_FILENO);
  if (settings.max_file_bytes != 0) {
    const rlimit limit{settings.max_file_bytes, settings.max_file_bytes};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  if (!settings.dir.empty() && ::chdir(settings.dir.c_str()) != 0) {
    ::_exit(126);
  }
  std::vector<char*> argv;
  std::string program = TDM_BINARY;
  argv.push_back(program.data());
  std::vector<std::string> copies = args;
  for (std::string& arg : copies) {
    argv.push_back(arg.data());
  }
  argv.push_back(nullptr);
  ::execv(program.c_str(), argv.data());
  ::_exit(127);
}

}  // namespace detail

/// Runs `tandem ARGS...` to its end.
inline Outcome run_tandem(const std::vector<std::string>& args, const RunSettings& settings = {}) {
  const TempDir scratch;
  write_text(scratch.path() + "/in", settings.input);
  const pid_t child = ::fork();
  if (child == 0) {
    detail::become_tandem(args, settings, scratch.path());
  }
  if (child < 0) {
    throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  }
  int status = 0;
  int to_send = settings.interrupt_when ? settings.num_interrupts : 0;
  while (::waitpid(child, &status, to_send > 0 ? WNOHANG : 0) == 0) {
    if (settings.interrupt_when()) {
      for (; to_send > 0; --to_send) {
        ::kill(child, settings.signal);
        // Two signals of one kind that arrive together are one.
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  Outcome outcome;
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  outcome.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  outcome.out = read_text(scratch.path() + "/out");
  outcome.err = read_text(scratch.path() + "/err");
  return outcome;
}

}  // namespace tandem::test
