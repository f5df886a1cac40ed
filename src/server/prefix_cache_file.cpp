#include "server/prefix_cache_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/log.h"
#include "io/atomic_file.h"

namespace tandem::server {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFileName = "prefix_cache.bin";
constexpr unsigned kOwnerOnly = 0600;  // it holds what users wrote

using Progress = std::function<void(std::int64_t done, std::int64_t total)>;

class FileWriter final : public SnapshotWriter {
 public:
  FileWriter(const std::string& path, Progress progress)
      : file_(path, kOwnerOnly), progress_(std::move(progress)) {}

  void begin(std::int64_t total_bytes) override { total_ = total_bytes; }
  void write(std::span<const std::byte> bytes) override {
    file_.write_at(done_, bytes);
    done_ += isize(bytes);
    progress_(done_, total_);
  }
  void commit() { file_.commit(); }

 private:
  AtomicFile file_;
  Progress progress_;
  std::int64_t done_ = 0;
  std::int64_t total_ = 0;
};

class FileReader final : public SnapshotReader {
 public:
  FileReader(int fd, std::int64_t size, Progress progress)
      : fd_(fd), size_(size), progress_(std::move(progress)) {}
  ~FileReader() override { ::close(fd_); }

  [[nodiscard]] std::int64_t size() const override { return size_; }
  [[nodiscard]] Status read(std::int64_t offset, std::span<std::byte> to) override {
    while (!to.empty()) {
      const ssize_t count = ::pread(fd_, to.data(), to.size(), offset);
      if (count < 0 && errno == EINTR) {
        continue;
      }
      if (count <= 0) {
        return fail("it cannot be read: {}",
                    count < 0 ? std::strerror(errno) : "it became shorter");
      }
      to = to.subspan(static_cast<std::size_t>(count));
      offset += count;
    }
    progress_(offset, size_);
    return Ok{};
  }

 private:
  int fd_;
  std::int64_t size_;
  Progress progress_;
};

void make_folder(const std::string& dir) {
  std::error_code error;
  const bool is_new = fs::create_directories(dir, error);
  if (!error && is_new) {
    fs::permissions(dir, fs::perms::owner_all, error);
  }
  if (error) {
    throw_error("{}: cannot create the folder of the prefix cache: {}", dir, error.message());
  }
}

/// Of servers that were killed while they wrote.
void remove_unfinished_files(const std::string& dir) {
  const std::string prefix = std::string(kFileName) + ".tmp-";
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    if (entry.path().filename().string().starts_with(prefix)) {
      fs::remove(entry.path(), error);
    }
  }
}

}  // namespace

PrefixCacheFile::PrefixCacheFile(PrefixCacheFileOptions options)
    : options_(std::move(options)), path_((fs::path(options_.dir) / kFileName).string()) {
  make_folder(options_.dir);
  const std::string lock_path = options_.dir + "/lock";
  lock_ = ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, kOwnerOnly);
  if (lock_ < 0) {
    throw_error("{}: cannot open: {}", lock_path, std::strerror(errno));
  }
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    ::close(lock_);
    throw_error("{}: {}; expected a folder of this server's own for its prefix cache", options_.dir,
                error == EWOULDBLOCK ? "another server uses it" : std::strerror(error));
  }
  remove_unfinished_files(options_.dir);
}

PrefixCacheFile::~PrefixCacheFile() {
  ::close(lock_);
}

void PrefixCacheFile::report(std::string_view label, std::int64_t done, std::int64_t total) const {
  if (options_.progress && total > 0) {
    options_.progress(label, done, total);
  }
}

void PrefixCacheFile::load(Engine& engine) const {
  // Not a pipe that nobody writes to, whatever lies there.
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    if (errno != ENOENT) {
      log_warn("prefix_cache.refused", "file={} reason=it cannot be opened: {}", path_,
               std::strerror(errno));
    }
    return;
  }
  struct stat status {};
  const bool is_file = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  constexpr std::string_view kLabel = "reading the prefix cache";
  FileReader reader(fd, is_file ? status.st_size : 0, [&](std::int64_t done, std::int64_t total) {
    report(kLabel, std::min(done, total - 1), total);
  });
  const Expected<LoadedSnapshot> result =
      is_file ? engine.load_prefix_cache(options_.key, reader)
              : Expected<LoadedSnapshot>(fail("it is not a regular file"));
  report(kLabel, reader.size(), reader.size());
  if (!result) {
    log_warn("prefix_cache.refused", "file={} reason={}; starting without", path_,
             result.message());
    return;
  }
  log_info("prefix_cache.loaded", "file={} blocks={} of {} checkpoints={} of {}", path_,
           result->loaded.blocks, result->found.blocks, result->loaded.checkpoints,
           result->found.checkpoints);
}

void PrefixCacheFile::save(Engine& engine) const {
  if (weights_changed_) {
    log_warn("prefix_cache.not_saved",
             "file={} reason=the weights were updated since the start, so the cache is not of the "
             "checkpoint that is served next time",
             path_);
    return;
  }
  try {
    constexpr std::string_view kLabel = "saving the prefix cache";
    std::int64_t size = 0;
    FileWriter writer(path_, [&](std::int64_t done, std::int64_t total) {
      size = total;
      report(kLabel, std::min(done, total - 1), total);
    });
    const SnapshotCounts counts = engine.save_prefix_cache(options_.key, writer);
    writer.commit();
    report(kLabel, size, size);
    log_info("prefix_cache.saved", "file={} blocks={} checkpoints={} bytes={}", path_,
             counts.blocks, counts.checkpoints, size);
  } catch (const std::exception& error) {
    log_warn("prefix_cache.not_saved", "reason={}", error.what());
  }
}

}  // namespace tandem::server
