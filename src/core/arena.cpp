#include "core/arena.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace tandem {

void Arena::FreeAligned::operator()(std::byte* pointer) const {
  std::free(pointer);
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
    const std::size_t size = std::max(bytes, block_bytes_);
    auto* raw = static_cast<std::byte*>(std::aligned_alloc(kAlignment, size));
    if (raw == nullptr) {
      throw std::bad_alloc();
    }
    blocks_.push_back({std::unique_ptr<std::byte, FreeAligned>(raw), size});
    used_ = 0;
  }
  std::byte* result = blocks_[current_].data.get() + used_;
  used_ += bytes;
  return result;
}

}  // namespace tandem
