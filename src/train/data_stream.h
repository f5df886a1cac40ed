// data_stream.h — the endless order in which records are taken: file order, or a new permutation
// each epoch. A position is a plain number, so resuming is setting it.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem {

class DataStream {
 public:
  DataStream(std::int64_t num_records, bool shuffle, std::uint64_t seed)
      : num_records_(num_records), shuffle_(shuffle), seed_(seed) {}

  /// Record at stream position `position` >= 0. Determinism: a function of (records, shuffle, seed,
  /// position).
  [[nodiscard]] std::int64_t at(std::int64_t position);

 private:
  std::int64_t num_records_;
  bool shuffle_;
  std::uint64_t seed_;
  std::int64_t epoch_ = -1;          // of order_
  std::vector<std::int64_t> order_;  // permutation of that epoch
};

}  // namespace tandem
