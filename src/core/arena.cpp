#include "core/arena.h"

#include <algorithm>

namespace tandem {

std::size_t Arena::capacity_bytes() const {
  std::size_t total = 0;
  for (const Block& block : blocks_) {
    total += block.bytes;
  }
  return total;
}

void* Arena::take_bytes(std::size_t bytes) {
  bytes = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  while (current_ < blocks_.size() && used_ + bytes > blocks_[current_].bytes) {
    ++current_;
    used_ = 0;
  }
  if (current_ == blocks_.size()) {
    const std::size_t size = std::max(bytes, block_bytes_);
    auto* raw = static_cast<std::byte*>(device_->allocate(size));
    blocks_.push_back({DevicePtr(raw, {device_}), size});
    used_ = 0;
  }
  std::byte* result = blocks_[current_].data.get() + used_;
  used_ += bytes;
  return result;
}

}  // namespace tandem
