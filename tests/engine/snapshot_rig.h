// snapshot_rig.h — a saved prefix cache in memory.
#pragma once

#include <algorithm>
#include <vector>

#include "engine_rig.h"

namespace tandem::test {

class MemoryWriter final : public SnapshotWriter {
 public:
  std::int64_t throw_at = -1;  // call of write() that fails

  void begin(std::int64_t total_bytes) override { announced_ = total_bytes; }
  void write(std::span<const std::byte> bytes) override {
    largest_ = std::max(largest_, isize(bytes));
    if (num_writes_++ == throw_at) {
      throw Error("disk full");
    }
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  [[nodiscard]] const std::vector<std::byte>& bytes() const { return bytes_; }
  [[nodiscard]] std::int64_t announced() const { return announced_; }
  [[nodiscard]] std::int64_t largest() const { return largest_; }
  [[nodiscard]] std::int64_t num_writes() const { return num_writes_; }

 private:
  std::vector<std::byte> bytes_;
  std::int64_t announced_ = -1;
  std::int64_t largest_ = 0;
  std::int64_t num_writes_ = 0;
};

class MemoryReader final : public SnapshotReader {
 public:
  explicit MemoryReader(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}
  std::int64_t fail_at = -1;  // call of read() that fails

  [[nodiscard]] std::int64_t size() const override { return isize(bytes_); }
  [[nodiscard]] Status read(std::int64_t offset, std::span<std::byte> to) override {
    if (num_reads_++ == fail_at) {
      return fail("the disk is gone");
    }
    TDM_CHECK(offset >= end_ && offset + isize(to) <= size(), offset, to.size(), end_);
    end_ = offset + isize(to);
    std::ranges::copy(std::span(bytes_).subspan(usize(offset), to.size()), to.begin());
    return Ok{};
  }
  [[nodiscard]] std::int64_t num_reads() const { return num_reads_; }

 private:
  std::vector<std::byte> bytes_;
  std::int64_t num_reads_ = 0;
  std::int64_t end_ = 0;
};

[[nodiscard]] inline SnapshotKey test_key() {
  return {{"weights", "1"}, {"device", "a machine"}};
}

[[nodiscard]] inline std::vector<std::byte> saved(Engine& engine) {
  MemoryWriter writer;
  (void)engine.save_prefix_cache(test_key(), writer);
  EXPECT_EQ(isize(writer.bytes()), writer.announced());
  return writer.bytes();
}

[[nodiscard]] inline Expected<LoadedSnapshot> load(Engine& engine, std::vector<std::byte> bytes) {
  MemoryReader reader(std::move(bytes));
  return engine.load_prefix_cache(test_key(), reader);
}

}  // namespace tandem::test
