#include "core/mmap_file.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace tandem {
namespace {

/// What a signal handler may read of a mapped file.
struct Mapping {
  std::atomic<const std::byte*> begin{nullptr};  // null: free
  std::atomic<std::size_t> size{0};
  std::atomic<char*> path{nullptr};
};

/// Of all mapped files; those beyond its size are only not named in a message.
std::array<Mapping, 1024>& mappings() {
  static std::array<Mapping, 1024> table;
  return table;
}

void remember(const std::byte* data, std::size_t size, const std::string& path) {
  char* const copy = ::strdup(path.c_str());
  for (Mapping& mapping : mappings()) {
    char* none = nullptr;
    if (mapping.path.compare_exchange_strong(none, copy)) {
      mapping.size = size;
      mapping.begin = data;
      return;
    }
  }
  std::free(copy);
}

void forget(const std::byte* data) {
  for (Mapping& mapping : mappings()) {
    const std::byte* begin = data;
    if (mapping.begin.compare_exchange_strong(begin, nullptr)) {
      std::free(mapping.path.exchange(nullptr));
      return;
    }
  }
}

std::atomic<int> unreadable_exit_code{0};

void write_text(const char* text) {
  if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) {
    return;  // there is nobody to tell
  }
}

void on_bus_error(int signal, siginfo_t* info, void* /*context*/) {
  const auto* const at = static_cast<const std::byte*>(info->si_addr);
  for (const Mapping& mapping : mappings()) {
    const std::byte* const begin = mapping.begin;
    if (begin != nullptr && at >= begin && at < begin + mapping.size) {
      write_text("tandem: ");
      write_text(mapping.path);
      write_text(
          ": a part of the file cannot be read any more: it was truncated after it was "
          "opened, or its disk fails\n");
      ::_exit(unreadable_exit_code);
    }
  }
  std::signal(signal, SIG_DFL);  // not a file of ours: the instruction runs again and ends us
}

}  // namespace

void explain_unreadable_pages(int exit_code) {
  static_cast<void>(mappings());  // made here, not in the handler
  unreadable_exit_code = exit_code;
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, nullptr);
}

Expected<MmapFile> MmapFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return fail("{}: cannot open: {}", path, std::strerror(errno));
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return fail("{}: expected a regular file", path);
  }
  const auto size = static_cast<std::size_t>(info.st_size);
  void* data = nullptr;
  if (size > 0) {
    data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      const int error = errno;
      ::close(fd);
      return fail("{}: cannot map {} bytes: {}", path, size, std::strerror(error));
    }
  }
  ::close(fd);
  if (data != nullptr) {
    remember(static_cast<const std::byte*>(data), size, path);
  }
  return MmapFile(path, static_cast<const std::byte*>(data), size);
}

MmapFile::MmapFile(MmapFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MmapFile& MmapFile::operator=(MmapFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MmapFile::~MmapFile() {
  if (data_ != nullptr) {
    forget(data_);
    ::munmap(const_cast<std::byte*>(data_),
             size_);  // NOLINT(cppcoreguidelines-pro-type-const-cast): munmap's C API
  }
}

}  // namespace tandem
