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
  Device& device = *data_.get_deleter().device;
  Storage copy(bytes_, device);
  device.copy(copy.data_.get(), data_.get(), static_cast<std::size_t>(bytes_));
  return copy;
}

}  // namespace tandem
