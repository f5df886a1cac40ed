#include "tensor/storage.h"

namespace tandem {

Storage::Storage(std::int64_t bytes, Device& device) : bytes_(bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  if (size > 0) {
    data_ = DevicePtr(static_cast<std::byte*>(device.allocate(size)), {&device});
    device.zero(data_.get(), size);
  }
}

Storage Storage::clone() const {
  if (bytes_ == 0) {
    return {};
  }
  Storage copy(bytes_, device());
  device().copy(copy.data_.get(), data_.get(), static_cast<std::size_t>(bytes_));
  return copy;
}

void Storage::zero() {
  if (bytes_ > 0) {
    device().zero(data_.get(), static_cast<std::size_t>(bytes_));
  }
}

void Storage::assign(std::span<const std::byte> bytes) {
  TDM_CHECK(bytes.size() == static_cast<std::size_t>(bytes_), bytes.size(), bytes_);
  if (bytes_ > 0) {
    device().upload(data_.get(), bytes.data(), bytes.size());
  }
}

}  // namespace tandem
