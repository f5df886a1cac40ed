#include "engine/cache/prefix_snapshot.h"

#include <map>
#include <optional>
#include <unordered_map>

#include "core/checked_cast.h"
#include "engine/cache/prefix_snapshot_format.h"

namespace tandem {
namespace {

using snapshot::Entry;
using snapshot::Header;

template <typename T>
void append(std::vector<std::byte>& to, std::span<const T> values) {
  const std::span<const std::byte> bytes = std::as_bytes(values);
  to.insert(to.end(), bytes.begin(), bytes.end());
}
template <typename T>
void append(std::vector<std::byte>& to, const T& value) {
  append(to, std::span<const T>(&value, 1));
}

class Saver {
 public:
  Saver(const PrefixParts& from, const SnapshotKey& key, SnapshotWriter& writer)
      : from_(from), key_(snapshot::key_text(from, key)), writer_(writer) {}

  SnapshotCounts run() {
    collect();
    const std::vector<std::byte> table = encode_table();
    Header header;
    header.key_bytes = checked_cast<std::uint32_t>(key_.size());
    header.table_bytes = isize(table);
    header.checksum = snapshot::header_checksum(header, key_);
    writer_.begin(static_cast<std::int64_t>(sizeof header) + isize(key_) + isize(table) +
                  snapshot::kChecksumBytes + snapshot::RecordSizes(from_).of(counts_));
    write(std::as_bytes(std::span(&header, 1)));
    write(std::as_bytes(std::span(key_)));
    buffer_ = table;
    stream_ = write_record(header.checksum);
    for (const NodeId node : nodes_) {
      write_block(from_.tree.block(node));
    }
    return counts_;
  }

 private:
  /// The way to each checkpoint, the last used one first.
  void collect() {
    std::unordered_map<NodeId, std::int32_t> place;
    std::map<std::string, std::int32_t> salts;
    std::vector<NodeId> way;
    for (const NodeId checkpoint : from_.tree.checkpoints_by_use()) {
      way.clear();
      for (std::optional<NodeId> id = checkpoint; id && !place.contains(*id);
           id = from_.tree.block(*id).parent) {
        way.push_back(*id);
      }
      for (; !way.empty(); way.pop_back()) {
        const PrefixBlock block = from_.tree.block(way.back());
        Entry entry;
        if (block.parent) {
          entry.parent = place.at(*block.parent);
        } else if (block.salt != nullptr) {
          const auto next = checked_cast<std::int32_t>(salts_.size());
          const auto [salt, is_new] = salts.emplace(*block.salt, next);
          entry.salt = salt->second;
          if (is_new) {
            salts_.push_back(block.salt);
          }
        }
        place[way.back()] = checked_cast<std::int32_t>(nodes_.size());
        nodes_.push_back(way.back());
        entries_.push_back(entry);
      }
      entries_[usize(place.at(checkpoint))].use = checked_cast<std::int32_t>(counts_.checkpoints++);
    }
    counts_.blocks = isize(nodes_);
  }

  [[nodiscard]] std::vector<std::byte> encode_table() const {
    std::vector<std::byte> table;
    append(table, isize(salts_));
    for (const CacheSalt& salt : salts_) {
      append(table, isize(*salt));
      append(table, std::span<const char>(*salt));
    }
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      append(table, entries_[i]);
      append(table, from_.tree.block(nodes_[i]).tokens);
    }
    return table;
  }

  void write_block(const PrefixBlock& block) {
    const std::size_t page_bytes = usize(from_.pages.page_bytes());
    buffer_.resize(block.pages.size() * page_bytes);
    for (std::size_t i = 0; i < block.pages.size(); ++i) {
      from_.pages.download(std::span(buffer_).subspan(i * page_bytes, page_bytes), block.pages[i]);
    }
    write_record(stream_);
    for (std::size_t layer = 0; block.state && layer < from_.slots.specs().size(); ++layer) {
      buffer_.resize(usize(from_.slots.record_bytes(layer)));
      from_.slots.download(buffer_, layer, *block.state);
      write_record(stream_);
    }
  }

  /// Writes buffer_ and its checksum, which is returned.
  std::uint64_t write_record(std::uint64_t stream) {
    const std::uint64_t checksum = snapshot::record_checksum(stream, offset_, buffer_);
    append(buffer_, checksum);
    write(buffer_);
    return checksum;
  }

  void write(std::span<const std::byte> bytes) {
    writer_.write(bytes);
    offset_ += isize(bytes);
  }

  const PrefixParts& from_;
  std::string key_;
  SnapshotWriter& writer_;
  std::vector<NodeId> nodes_;  // in the order of the stream
  std::vector<Entry> entries_;
  std::vector<CacheSalt> salts_;
  SnapshotCounts counts_;
  std::vector<std::byte> buffer_;
  std::uint64_t stream_ = 0;  // the table's checksum
  std::int64_t offset_ = 0;
};

}  // namespace

SnapshotCounts save_prefix_snapshot(const PrefixParts& from, const SnapshotKey& key,
                                    SnapshotWriter& writer) {
  return Saver(from, key, writer).run();
}

}  // namespace tandem
