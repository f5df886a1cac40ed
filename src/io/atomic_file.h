// atomic_file.h — a file that appears complete or not at all: written beside its final name,
// synced, then renamed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tandem {

/// Writes to "<path>.tmp-<pid>" until commit() renames it to `path`; until then an older `path`
/// stays as it was. Errors: every member throws Error naming the path ("disk full" for ENOSPC and
/// quotas), after the temporary file has been removed. The object takes no further calls then
/// (TDM_CHECK).
class AtomicFile {
 public:
  /// `mode`: permissions of a new file, less the umask.
  explicit AtomicFile(std::string path, unsigned mode = 0666);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();  // removes the temporary file unless committed

  /// Writes all of `bytes` at `offset` (bytes from the start of the file); a gap reads as zeros.
  void write_at(std::int64_t offset, std::span<const std::byte> bytes);
  /// fsync of the file, rename, fsync of the folder.
  void commit();

  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  [[noreturn]] void give_up(std::string_view action, int error);
  void discard() noexcept;

  std::string path_;
  std::string temp_path_;
  int fd_ = -1;
};

/// Replaces `path` by `content` in one step.   Errors: throws Error as AtomicFile does.
void write_file_atomic(const std::string& path, std::span<const std::byte> content);
void write_file_atomic(const std::string& path, std::string_view content);

}  // namespace tandem
