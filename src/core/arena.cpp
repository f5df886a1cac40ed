#include "core/arena.h"

#include <algorithm>

#include "core/error.h"

namespace tandem {

Arena Arena::fixed(std::size_t bytes, Device& device) {
  Arena arena(bytes, device);
  if (bytes > 0) {
    arena.add_block(bytes);
  }
  arena.fixed_ = true;
  return arena;
}

void Arena::trim() {
  if (!fixed_) {
    const std::size_t kept = std::min(current_ + (used_ > 0 ? 1 : 0), blocks_.size());
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(kept), blocks_.end());
  }
}

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
    if (fixed_) {
      throw_error("workspace: {} bytes are in use and {} more are needed, but it has {}", total_,
                  bytes, capacity_bytes());
    }
    add_block(std::max(bytes, block_bytes_));
    used_ = 0;
  }
  std::byte* result = blocks_[current_].data.get() + used_;
  used_ += bytes;
  total_ += bytes;
  peak_ = std::max(peak_, total_);
  return result;
}

void Arena::add_block(std::size_t bytes) {
  auto* raw = static_cast<std::byte*>(device_->allocate(bytes));
  blocks_.push_back({DevicePtr(raw, {device_}), bytes});
}

}  // namespace tandem
