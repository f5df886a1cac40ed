// prefix_snapshot_load.cpp — the reading half of prefix_snapshot.h.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>

#include "core/checked_cast.h"
#include "engine/cache/prefix_snapshot_format.h"

namespace tandem {
namespace {

using snapshot::Entry;
using snapshot::Header;
using snapshot::kChecksumBytes;
using snapshot::kNone;

class Loader {
 public:
  Loader(const PrefixParts& to, const SnapshotKey& key, SnapshotReader& reader)
      : to_(to), key_(snapshot::key_text(to, key)), reader_(reader), sizes_(to) {}

  Expected<LoadedSnapshot> run() {
    for (const auto part :
         {&Loader::read_header, &Loader::read_table, &Loader::choose, &Loader::read_blocks}) {
      if (Status status = (this->*part)(); !status) {
        return status.failure();
      }
    }
    return LoadedSnapshot{loaded_, found_};
  }

 private:
  /// The next `bytes` of the stream, into buffer_.
  Status read(std::int64_t bytes) {
    if (bytes > reader_.size() - offset_) {
      return fail("it is cut off after {} bytes", reader_.size());
    }
    buffer_.resize(usize(bytes));
    Status status = reader_.read(offset_, buffer_);
    offset_ += bytes;
    return status;
  }

  /// A record of `bytes` into buffer_, compared with its checksum, which is returned.
  Expected<std::uint64_t> read_record(std::uint64_t stream, std::int64_t bytes) {
    const std::int64_t at = offset_;
    if (Status status = read(bytes + kChecksumBytes); !status) {
      return status.failure();
    }
    std::uint64_t checksum = 0;
    std::memcpy(&checksum, buffer_.data() + bytes, sizeof checksum);
    buffer_.resize(usize(bytes));
    if (checksum != snapshot::record_checksum(stream, at, buffer_)) {
      return fail("the checksum of bytes {} to {} is wrong", at, offset_);
    }
    return checksum;
  }

  Status read_header() {
    if (Status status = read(sizeof header_); !status) {
      return status;
    }
    std::memcpy(&header_, buffer_.data(), sizeof header_);
    if (header_.magic != snapshot::kMagic) {
      return fail("it is not a saved prefix cache");
    }
    if (header_.version != snapshot::kVersion) {
      return fail("its format version is {}: expected {}", header_.version, snapshot::kVersion);
    }
    if (header_.key_bytes > snapshot::kMaxKeyBytes) {
      return fail("the checksum of its header is wrong");
    }
    if (Status status = read(header_.key_bytes); !status) {
      return status;
    }
    const std::string key(reinterpret_cast<const char*>(buffer_.data()), buffer_.size());
    if (header_.checksum != snapshot::header_checksum(header_, key)) {
      return fail("the checksum of its header is wrong");
    }
    return compare_keys(key);
  }

  Status compare_keys(std::string_view saved) const {
    std::string_view here = key_;
    while (!saved.empty() || !here.empty()) {
      const auto next_line = [](std::string_view& text) {
        const std::string_view line = text.substr(0, text.find('\n'));
        text.remove_prefix(std::min(line.size() + 1, text.size()));
        return line;
      };
      const std::string_view saved_line = next_line(saved);
      const std::string_view line = next_line(here);
      if (saved_line != line) {
        return fail("it was saved with '{}': expected '{}'", saved_line, line);
      }
    }
    return Ok{};
  }

  Status read_table() {
    if (header_.table_bytes < 0 || header_.table_bytes > reader_.size()) {
      return fail("it is cut off after {} bytes", reader_.size());
    }
    const Expected<std::uint64_t> checksum = read_record(header_.checksum, header_.table_bytes);
    if (!checksum) {
      return checksum.failure();
    }
    stream_ = *checksum;
    std::span<const std::byte> rest = buffer_;
    if (!take_salts(rest) || !take_entries(rest)) {
      return fail("its table of blocks is not well formed");
    }
    const std::int64_t expected = offset_ + sizes_.of(found_);
    if (reader_.size() != expected) {
      return fail("it has {} bytes: expected {}", reader_.size(), expected);
    }
    return Ok{};
  }

  template <typename T>
  static bool take(std::span<const std::byte>& from, std::span<T> to) {
    if (from.size() < to.size_bytes()) {
      return false;
    }
    std::memcpy(to.data(), from.data(), to.size_bytes());
    from = from.subspan(to.size_bytes());
    return true;
  }
  template <typename T>
  static bool take(std::span<const std::byte>& from, T& to) {
    return take(from, std::span<T>(&to, 1));
  }

  bool take_salts(std::span<const std::byte>& from) {
    std::int64_t count = 0;
    if (!take(from, count)) {
      return false;
    }
    for (; count > 0; --count) {
      std::int64_t size = 0;
      if (!take(from, size) || size < 0 || size > isize(from)) {
        return false;
      }
      std::string salt(usize(size), '\0');
      if (!take(from, std::span(salt))) {
        return false;
      }
      salts_.push_back(std::make_shared<const std::string>(std::move(salt)));
    }
    return count == 0;
  }

  bool take_entries(std::span<const std::byte>& from) {
    const std::size_t block_tokens = usize(to_.tree.limits().block_tokens);
    while (!from.empty()) {
      Entry entry;
      tokens_.resize(tokens_.size() + block_tokens);
      if (!take(from, entry) || !take(from, std::span(tokens_).last(block_tokens)) ||
          entry.parent < kNone || entry.parent >= isize(entries_) || entry.salt < kNone ||
          entry.salt >= isize(salts_) || (entry.parent != kNone && entry.salt != kNone)) {
        return false;
      }
      entries_.push_back(entry);
      found_.checkpoints += entry.use == kNone ? 0 : 1;
    }
    found_.blocks = isize(entries_);
    by_use_.assign(usize(found_.checkpoints), kNone);
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const std::int32_t use = entries_[i].use;
      if (use == kNone) {
        continue;
      }
      if (use < 0 || use >= found_.checkpoints || by_use_[usize(use)] != kNone) {
        return false;
      }
      by_use_[usize(use)] = static_cast<std::int32_t>(i);
    }
    return true;
  }

  /// Checkpoints with the blocks that lead to them, the last used ones first, as long as they fit.
  Status choose() {
    states_chosen_.assign(entries_.size(), false);
    blocks_chosen_.assign(entries_.size(), false);
    const std::int64_t max_checkpoints = to_.tree.num_reserved_slots();
    const std::int64_t max_blocks = to_.tree.max_blocks();
    for (const std::int32_t checkpoint : by_use_) {
      std::vector<std::size_t> way;
      for (std::int32_t i = checkpoint; i != kNone && !blocks_chosen_[usize(i)];
           i = entries_[usize(i)].parent) {
        way.push_back(usize(i));
      }
      if (loaded_.checkpoints == max_checkpoints || loaded_.blocks + isize(way) > max_blocks) {
        continue;
      }
      for (const std::size_t i : way) {
        blocks_chosen_[i] = true;
      }
      states_chosen_[usize(checkpoint)] = true;
      loaded_.blocks += isize(way);
      ++loaded_.checkpoints;
    }
    return Ok{};
  }

  Status read_blocks() {
    std::vector<std::optional<NodeId>> nodes(entries_.size());
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const std::int64_t end = offset_ + sizes_.block;
      if (blocks_chosen_[i]) {
        if (Status status = read_block(i, nodes); !status) {
          return status;
        }
      }
      offset_ = end;
      if (entries_[i].use == kNone) {
        continue;
      }
      if (states_chosen_[i]) {
        if (Status status = read_state(*nodes[i]); !status) {
          return status;
        }
      }
      offset_ = end + sizes_.checkpoint;
    }
    for (auto checkpoint = by_use_.rbegin(); checkpoint != by_use_.rend(); ++checkpoint) {
      if (states_chosen_[usize(*checkpoint)]) {
        to_.tree.touch(*nodes[usize(*checkpoint)]);
      }
    }
    return Ok{};
  }

  Status read_block(std::size_t i, std::vector<std::optional<NodeId>>& nodes) {
    const Expected<std::uint64_t> checksum = read_record(stream_, sizes_.block - kChecksumBytes);
    if (!checksum) {
      return checksum.failure();
    }
    const std::int64_t page_bytes = to_.pages.page_bytes();
    const std::int64_t num_pages = to_.tree.limits().block_tokens / to_.pages.page_size();
    std::vector<PageId> pages;
    for (std::int64_t page = 0; page < num_pages; ++page) {
      pages.push_back(to_.pages.take());
      to_.pages.upload(pages.back(),
                       std::span(buffer_).subspan(usize(page * page_bytes), usize(page_bytes)));
    }
    const Entry& entry = entries_[i];
    const std::size_t block_tokens = usize(to_.tree.limits().block_tokens);
    nodes[i] = to_.tree.restore(entry.parent == kNone ? std::nullopt : nodes[usize(entry.parent)],
                                std::span(tokens_).subspan(i * block_tokens, block_tokens),
                                entry.salt == kNone ? nullptr : salts_[usize(entry.salt)], pages);
    for (const PageId page : pages) {
      to_.pages.release(page);  // the tree has its own reference
    }
    if (!nodes[i]) {
      return fail("it has a block twice");
    }
    return Ok{};
  }

  Status read_state(NodeId node) {
    const SlotId slot = to_.tree.take_empty_checkpoint();
    for (std::size_t layer = 0; layer < to_.slots.specs().size(); ++layer) {
      const Expected<std::uint64_t> checksum = read_record(stream_, to_.slots.record_bytes(layer));
      if (!checksum) {
        to_.tree.drop_checkpoint(slot);
        return checksum.failure();
      }
      to_.slots.upload(layer, slot, buffer_);
    }
    to_.tree.attach(node, to_.tree.block(node).depth, slot);
    return Ok{};
  }

  const PrefixParts& to_;
  std::string key_;
  SnapshotReader& reader_;
  snapshot::RecordSizes sizes_;
  Header header_;
  std::uint64_t stream_ = 0;  // the table's checksum
  std::vector<CacheSalt> salts_;
  std::vector<Entry> entries_;
  std::vector<std::int32_t> tokens_;  // [entries, block_tokens]
  std::vector<std::int32_t> by_use_;  // entries with a checkpoint
  std::vector<bool> blocks_chosen_;   // [entries]
  std::vector<bool> states_chosen_;   // [entries]
  SnapshotCounts found_;
  SnapshotCounts loaded_;
  std::vector<std::byte> buffer_;
  std::int64_t offset_ = 0;
};

}  // namespace

Expected<LoadedSnapshot> load_prefix_snapshot(const PrefixParts& to, const SnapshotKey& key,
                                              SnapshotReader& reader) {
  TDM_CHECK(to.tree.num_pages() == 0, to.tree.num_pages());
  Expected<LoadedSnapshot> result = Loader(to, key, reader).run();
  if (!result) {
    to.tree.clear();
  }
  return result;
}

}  // namespace tandem
