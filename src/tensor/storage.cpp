#include "tensor/storage.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace tandem {

void Storage::Free::operator()(std::byte* pointer) const {
  std::free(pointer);
}

Storage::Storage(std::int64_t bytes) : bytes_(bytes) {
  const auto rounded = (static_cast<std::size_t>(bytes) + 63) / 64 * 64;
  if (rounded == 0) {
    return;
  }
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
  if (data_ == nullptr) {
    throw std::bad_alloc();
  }
  std::memset(data_.get(), 0, rounded);
}

Storage Storage::clone() const {
  Storage copy(bytes_);
  if (bytes_ > 0) {
    std::memcpy(copy.data_.get(), data_.get(), static_cast<std::size_t>(bytes_));
  }
  return copy;
}

}  // namespace tandem
