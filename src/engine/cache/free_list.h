// free_list.h — free ids of a pool, lowest first, so that a run's layout in memory repeats exactly.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "core/checked_cast.h"

namespace tandem {

class FreeList {
 public:
  explicit FreeList(std::int64_t num_ids) : heap_(usize(num_ids)) {
    std::iota(heap_.begin(), heap_.end(), 0);  // ascending order is a valid min-heap
  }
  [[nodiscard]] std::int64_t size() const { return isize(heap_); }
  [[nodiscard]] const std::vector<std::int32_t>& ids() const { return heap_; }

  /// The lowest free id; the list must not be empty. O(log size), no allocation.
  [[nodiscard]] std::int32_t take() {
    TDM_CHECK(!heap_.empty());
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>{});
    const std::int32_t id = heap_.back();
    heap_.pop_back();
    return id;
  }
  /// `id` must have been taken: the pools check that.
  void put(std::int32_t id) {
    heap_.push_back(id);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>{});
  }

 private:
  std::vector<std::int32_t> heap_;  // min-heap; its capacity is the number of ids from the start
};

}  // namespace tandem
