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

}  // namespace tandem
