// safetensors.h — strict reader and deterministic writer of one safetensors file.
// Format: u64 little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, raw
// little-endian data. Source: huggingface/safetensors, format description; the reader refuses
// whatever that description does not allow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/checked_cast.h"
#include "core/error.h"
#include "core/mmap_file.h"
#include "io/atomic_file.h"
#include "tensor/dtype.h"

namespace tandem {

using Metadata = std::map<std::string, std::string>;

/// "[2, 3]"; "[]" for a scalar.
[[nodiscard]] std::string shape_text(std::span<const std::int64_t> shape);

/// Name, type and extents of a tensor, without its data.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;

  [[nodiscard]] std::int64_t numel() const;
  [[nodiscard]] std::int64_t size_bytes() const { return numel() * dtype_size(dtype); }
  bool operator==(const TensorSpec&) const = default;
};

/// A tensor in a mapped file. `bytes` belongs to the file object it came from and may be misaligned
/// for its dtype (the format does not promise alignment): read it through copy().
struct TensorInfo : TensorSpec {
  std::span<const std::byte> bytes;

  /// The elements as a vector of T, which must have the dtype's size (TDM_CHECK); no conversion.
  template <typename T>
  requires std::is_trivially_copyable_v<T>
  [[nodiscard]] std::vector<T> copy() const {
    TDM_CHECK(sizeof(T) == usize(dtype_size(dtype)), name, sizeof(T));
    std::vector<T> out(bytes.size() / sizeof(T));
    if (!out.empty()) {
      std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
    }
    return out;
  }
};

struct SafetensorsContents {
  std::vector<TensorInfo> tensors;  // ascending by name
  Metadata metadata;
};

/// Parses the image of a whole file; `label` names it in errors. The result points into `image`.
/// Errors: a Failure naming file, tensor and what was expected.
[[nodiscard]] Expected<SafetensorsContents> parse_safetensors(std::string_view label,
                                                              std::span<const std::byte> image);

class SafetensorsFile {
 public:
  /// Errors: a Failure naming the path: missing file, or as parse_safetensors().
  [[nodiscard]] static Expected<SafetensorsFile> open(const std::string& path);

  [[nodiscard]] const std::string& path() const { return map_.path(); }
  /// Ascending by name; the data lives as long as this object (moving it keeps the addresses).
  [[nodiscard]] std::span<const TensorInfo> tensors() const { return contents_.tensors; }
  [[nodiscard]] const Metadata& metadata() const { return contents_.metadata; }
  /// nullptr when there is no such tensor.
  [[nodiscard]] const TensorInfo* find(std::string_view name) const;

 private:
  SafetensorsFile(MmapFile map, SafetensorsContents contents)
      : map_(std::move(map)), contents_(std::move(contents)) {}

  MmapFile map_;
  SafetensorsContents contents_;
};

/// Where a file's parts go: `header` is everything before the data, padded to 8 bytes; offsets
/// count from the start of the data. Tensors are laid out by falling element size, then by name, so
/// that each is aligned for its dtype.
struct SafetensorsLayout {
  std::string header;
  std::map<std::string, std::int64_t, std::less<>> offsets;
  std::int64_t data_bytes = 0;
};
[[nodiscard]] SafetensorsLayout plan_safetensors(std::span<const TensorSpec> specs,
                                                 const Metadata& metadata);

/// Writes a file whose tensors are known beforehand; their data may come in any order and in
/// pieces. The bytes depend only on specs, metadata and data. Nothing is visible under `path`
/// before finish(). Errors: throws Error naming the path, as AtomicFile; TDM_CHECK on duplicate or
/// unknown names and wrong sizes.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::vector<TensorSpec> specs,
                    const Metadata& metadata = {});

  /// Appends to the tensor's data.
  void write(std::string_view name, std::span<const std::byte> bytes);
  /// Every tensor must be complete.
  void finish();

 private:
  struct Slot {
    std::int64_t next = 0;  // file offset of the next byte
    std::int64_t end = 0;
  };
  AtomicFile file_;
  std::map<std::string, Slot, std::less<>> slots_;
};

}  // namespace tandem
