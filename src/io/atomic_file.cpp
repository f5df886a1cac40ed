#include "io/atomic_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "core/check.h"
#include "core/checked_cast.h"
#include "core/error.h"

namespace tandem {
namespace {

std::string reason(int error) {
  switch (error) {
    case ENOSPC:
      return "disk full";
    case EDQUOT:
      return "disk full (quota)";
    case EFBIG:
      return "file too large (limit of the process or the file system)";
    default:
      return std::strerror(error);
  }
}

/// Makes the rename itself durable. Some file systems cannot sync a folder and say EINVAL: nothing
/// to do there.
int sync_parent(const std::string& path) {
  const auto slash = path.find_last_of('/');
  const std::string parent = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int fd = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return errno;
  }
  const int error = ::fsync(fd) != 0 && errno != EINVAL ? errno : 0;
  ::close(fd);
  return error;
}

}  // namespace

AtomicFile::AtomicFile(std::string path, unsigned mode)
    : path_(std::move(path)), temp_path_(fmt::format("{}.tmp-{}", path_, ::getpid())) {
  fd_ = ::open(temp_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, mode);
  if (fd_ < 0) {
    throw_error("{}: cannot create: {}", path_, reason(errno));
  }
}

AtomicFile::~AtomicFile() {
  discard();
}

void AtomicFile::discard() noexcept {
  if (fd_ >= 0) {
    ::close(fd_);
    ::unlink(temp_path_.c_str());
    fd_ = -1;
  }
}

void AtomicFile::give_up(std::string_view action, int error) {
  discard();
  throw_error("{}: cannot {}: {}", path_, action, reason(error));
}

void AtomicFile::write_at(std::int64_t offset, std::span<const std::byte> bytes) {
  TDM_CHECK(fd_ >= 0 && offset >= 0, path_, offset);
  // One pwrite moves at most 0x7ffff000 bytes on Linux; smaller pieces also keep a short write
  // cheap to resume.
  constexpr std::size_t kMaxPiece = std::size_t{1} << 28;
  while (!bytes.empty()) {
    const std::size_t piece = std::min(bytes.size(), kMaxPiece);
    const ssize_t written = ::pwrite(fd_, bytes.data(), piece, offset);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      give_up("write", written < 0 ? errno : ENOSPC);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += written;
  }
}

void AtomicFile::commit() {
  TDM_CHECK(fd_ >= 0, path_);
  if (::fsync(fd_) != 0) {
    give_up("sync", errno);
  }
  // close() reports delayed write errors on network file systems; the descriptor is gone either
  // way.
  if (::close(std::exchange(fd_, -1)) != 0) {
    const int error = errno;
    ::unlink(temp_path_.c_str());
    throw_error("{}: cannot close: {}", path_, reason(error));
  }
  if (std::rename(temp_path_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temp_path_.c_str());
    throw_error("{}: cannot rename into place: {}", path_, reason(error));
  }
  if (const int error = sync_parent(path_); error != 0) {
    throw_error("{}: written, but its folder cannot be synced: {}", path_, reason(error));
  }
}

void write_file_atomic(const std::string& path, std::span<const std::byte> content) {
  AtomicFile file(path);
  file.write_at(0, content);
  file.commit();
}

void write_file_atomic(const std::string& path, std::string_view content) {
  write_file_atomic(path, std::as_bytes(std::span(content)));
}

}  // namespace tandem
