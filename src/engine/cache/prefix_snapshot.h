// prefix_snapshot.h — a prefix tree as a stream of bytes, with the rows and states it stands for,
// so that a server that starts again goes on with the beginnings it knew (docs/prefix_cache.md,
// "Across a restart").
//
// The engine names no files: who saves gives a SnapshotWriter, who loads a SnapshotReader. Memory
// for one block's rows, one layer of a state and the token ids is all that is taken beside the
// pools.
//
//   header   magic, format version, sizes of the two below, checksum of header and key
//   key      lines "name value": what must be the same for the bits to be of use
//   table    salts; for each block its parent, salt, order of use and token ids
//   records  for each block of the table the rows of its pages, then, if it has a checkpoint, the
//            state and convolution window of each layer
//
// Table and records end in a checksum that depends on their place in this very stream. Blocks
// stand in the order in which their checkpoints were used, the latest first, parents before
// children. All integers have the machine's byte order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/cache/prefix_tree.h"

namespace tandem {

class SnapshotWriter {
 public:
  SnapshotWriter() = default;
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;
  virtual ~SnapshotWriter() = default;

  /// Called once, first: the sum of what write() will get.
  virtual void begin(std::int64_t total_bytes) = 0;
  /// The next bytes. Errors: may throw Error, which ends the saving.
  virtual void write(std::span<const std::byte> bytes) = 0;
};

class SnapshotReader {
 public:
  SnapshotReader() = default;
  SnapshotReader(const SnapshotReader&) = delete;
  SnapshotReader& operator=(const SnapshotReader&) = delete;
  virtual ~SnapshotReader() = default;

  [[nodiscard]] virtual std::int64_t size() const = 0;
  /// All bytes of `to`, from `offset` on, which lie within size(). Offsets only grow.
  [[nodiscard]] virtual Status read(std::int64_t offset, std::span<std::byte> to) = 0;
};

/// Names and values, each without a line break, of what decides about the cached bits and is not
/// the engine's to know: weights, device, program.
using SnapshotKey = std::vector<std::pair<std::string, std::string>>;

struct SnapshotCounts {
  std::int64_t blocks = 0;
  std::int64_t checkpoints = 0;
  bool operator==(const SnapshotCounts&) const = default;
};
struct LoadedSnapshot {
  SnapshotCounts loaded;
  SnapshotCounts found;
};

/// The pools and the tree over them.
struct PrefixParts {
  PagePool& pages;
  StatePool& slots;
  PrefixTree& tree;
};

/// Everything that leads to a checkpoint. Nothing changes. Errors: throws what `writer` and the
/// device throw.
SnapshotCounts save_prefix_snapshot(const PrefixParts& from, const SnapshotKey& key,
                                    SnapshotWriter& writer);

/// Fills an empty tree: all of the snapshot, or, if the pools are smaller, what was used last and
/// fits. Errors: a sentence that says what is wrong with the snapshot or what differs from the
/// present; the tree is empty then. Throws what the device throws, which leaves pools and tree of
/// no more use.
[[nodiscard]] Expected<LoadedSnapshot> load_prefix_snapshot(const PrefixParts& to,
                                                            const SnapshotKey& key,
                                                            SnapshotReader& reader);

}  // namespace tandem
