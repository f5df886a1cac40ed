// mmap_file.h — a read-only memory map of a whole file; the map lives as long as the object.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/error.h"

namespace tandem {

class MmapFile {
 public:
  /// Errors: a Failure naming the path when the file is missing, is not a regular file, or cannot
  /// be mapped.
  static Expected<MmapFile> open(const std::string& path);

  MmapFile(const MmapFile&) = delete;
  MmapFile& operator=(const MmapFile&) = delete;
  MmapFile(MmapFile&& other) noexcept;
  MmapFile& operator=(MmapFile&& other) noexcept;
  ~MmapFile();

  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_, size_}; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  MmapFile(std::string path, const std::byte* data, std::size_t size)
      : path_(std::move(path)), data_(data), size_(size) {}

  std::string path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// From now on, when a page of a mapped file cannot be read (the file was truncated, the disk
/// fails), the process ends with `exit_code` and a message that names the file, not by a bare
/// SIGBUS.
void explain_unreadable_pages(int exit_code);

}  // namespace tandem
