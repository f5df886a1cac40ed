#include "train/data_stream.h"

#include <numeric>
#include <utility>

#include "core/checked_cast.h"
#include "core/rng.h"

namespace tandem {

std::int64_t DataStream::at(std::int64_t position) {
  const std::int64_t epoch = position / num_records_;
  const std::int64_t offset = position % num_records_;
  if (!shuffle_) {
    return offset;
  }
  if (epoch != epoch_) {
    order_.resize(usize(num_records_));
    std::iota(order_.begin(), order_.end(), 0);
    Rng rng(mix_key({seed_, static_cast<std::uint64_t>(epoch)}));
    for (std::size_t i = order_.size(); i > 1; --i) {
      std::swap(order_[i - 1], order_[rng.below(i)]);
    }
    epoch_ = epoch;
  }
  return order_[usize(offset)];
}

}  // namespace tandem
