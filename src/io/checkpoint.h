// checkpoint.h — the tensors of a checkpoint folder, in one safetensors file or in shards with an
// index.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "io/safetensors.h"

namespace tandem {

/// `<stem>.safetensors.index.json`: which shard holds which tensor.
struct CheckpointIndex {
  std::map<std::string, std::string, std::less<>> weight_map;  // tensor -> file name
};

/// Parses an index; `label` names it in errors. Shards are plain names "*.safetensors" in the same
/// folder: a name with a separator, or one that starts with a dot, is refused.
[[nodiscard]] Expected<CheckpointIndex> parse_checkpoint_index(std::string_view label,
                                                               std::string_view text);

class Checkpoint {
 public:
  /// Opens `<dir>/<stem>.safetensors`, or `<dir>/<stem>.safetensors.index.json` and all its shards.
  /// Index and shards must list exactly the same tensors.   Errors: a Failure naming folder, file
  /// and tensor.
  [[nodiscard]] static Expected<Checkpoint> open(const std::string& dir,
                                                 const std::string& stem = "model");

  /// Tensors that lie elsewhere in memory and outlive this object; `label` stands for the folder.
  [[nodiscard]] static Checkpoint of(std::string label, std::vector<TensorInfo> tensors);

  [[nodiscard]] const std::string& dir() const { return dir_; }
  [[nodiscard]] std::int64_t num_tensors() const { return isize(tensors_); }
  /// Names, ascending.
  [[nodiscard]] std::vector<std::string> names() const;
  /// nullptr when no shard has it. Data lives as long as this object.
  [[nodiscard]] const TensorInfo* find(std::string_view name) const;
  /// `__metadata__` of the only file; of shards, merged (the first shard by name wins).
  [[nodiscard]] const Metadata& metadata() const { return metadata_; }

  /// The tensor, if it has one of `dtypes` and exactly `shape`; marks it used. Taking it again is
  /// allowed (tied weights). Errors: "checkpoint X: tensor Y: expected ..., found ... in shard Z".
  [[nodiscard]] Expected<TensorInfo> take(std::string_view name,
                                          std::initializer_list<DType> dtypes,
                                          std::span<const std::int64_t> shape);
  [[nodiscard]] Expected<TensorInfo> take(std::string_view name, DType dtype,
                                          std::span<const std::int64_t> shape) {
    return take(name, {dtype}, shape);
  }
  /// Marks every tensor whose name starts with `prefix` as used (parts of a model that are skipped
  /// on purpose).
  void skip_prefix(std::string_view prefix);
  /// Names never taken, ascending. A loader refuses a checkpoint with leftovers.
  [[nodiscard]] std::vector<std::string> unused() const;

 private:
  struct Entry {
    const TensorInfo* info = nullptr;  // in shards_ or in_memory_
    std::size_t shard = 0;
    bool used = false;
  };
  explicit Checkpoint(std::string dir) : dir_(std::move(dir)) {}
  Status add_shard(const std::string& file_name);

  std::string dir_;
  std::vector<std::string> shard_names_;
  std::vector<SafetensorsFile> shards_;
  std::vector<TensorInfo> in_memory_;
  std::map<std::string, Entry, std::less<>> tensors_;
  Metadata metadata_;
};

struct WriteCheckpointOptions {
  std::string stem = "model";
  /// Data bytes of a shard; a larger tensor gets a shard of its own.
  std::int64_t max_shard_bytes = std::int64_t{4} << 30;
  Metadata metadata = {};
};

/// Writes `tensors` (any order) into `dir`, which is created: one file, or shards
/// `<stem>-00001-of-0000N.safetensors` by ascending name and then the index, so that an interrupted
/// write cannot be opened. Same input, same bytes. Returns the file names written. Errors: throws
/// Error when the disk fails, or when the folder already holds a checkpoint of that stem.
std::vector<std::string> write_checkpoint(const std::string& dir,
                                          std::span<const TensorInfo> tensors,
                                          const WriteCheckpointOptions& options = {});

}  // namespace tandem
