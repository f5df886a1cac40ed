// prefix_snapshot_format.h — the parts of a saved prefix tree that saver and loader share; the
// whole is drawn in prefix_snapshot.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "engine/cache/prefix_snapshot.h"

namespace tandem::snapshot {

inline constexpr std::array<char, 8> kMagic{'t', 'a', 'n', 'd', 'e', 'm', 'P', 'C'};
inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::uint32_t kMaxKeyBytes = 1U << 20;
inline constexpr std::int64_t kChecksumBytes = sizeof(std::uint64_t);
inline constexpr std::int32_t kNone = -1;

struct Header {
  std::array<char, 8> magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t key_bytes = 0;
  std::int64_t table_bytes = 0;  // without its checksum
  std::uint64_t checksum = 0;    // of the above and the key
};
static_assert(std::has_unique_object_representations_v<Header>);

/// A block of the table, before its tokens.
struct Entry {
  std::int32_t parent = kNone;  // place in the table, before this one
  std::int32_t salt = kNone;    // place among the salts; of a first block only
  std::int32_t use = kNone;     // 0 is the checkpoint that was used last; kNone: no checkpoint
};
static_assert(std::has_unique_object_representations_v<Entry>);

/// The key's text: a line for each thing that must be equal, those of the pools last.
[[nodiscard]] std::string key_text(const PrefixParts& parts, const SnapshotKey& key);

/// Header::checksum of a header with this key.
[[nodiscard]] std::uint64_t header_checksum(Header header, std::string_view key);

/// Checksum of a record, or of the table, that begins at `offset`. `stream`: for records the
/// table's checksum, for the table the header's, so that none is taken for one of another stream.
[[nodiscard]] std::uint64_t record_checksum(std::uint64_t stream, std::int64_t offset,
                                            std::span<const std::byte> bytes);

/// Bytes of the records of a block and of a checkpoint, checksums included.
struct RecordSizes {
  explicit RecordSizes(const PrefixParts& parts);
  [[nodiscard]] std::int64_t of(const SnapshotCounts& counts) const {
    return counts.blocks * block + counts.checkpoints * checkpoint;
  }
  std::int64_t block = 0;
  std::int64_t checkpoint = 0;
};

}  // namespace tandem::snapshot
