// storage.h — owned memory of a device, the host's by default. Move-only; a copy is the named
// clone().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/device.h"
#include "tensor/view.h"

namespace tandem {

class Storage {
 public:
  Storage() = default;
  /// Zero-filled and aligned to 256 bytes. `device` outlives the storage.
  /// Errors: std::bad_alloc, or what the device throws.
  explicit Storage(std::int64_t bytes, Device& device = host_device());

  [[nodiscard]] std::int64_t size_bytes() const { return bytes_; }
  [[nodiscard]] std::byte* data() { return data_.get(); }
  [[nodiscard]] const std::byte* data() const { return data_.get(); }
  [[nodiscard]] Storage clone() const;
  /// Where the memory is; the storage must not be empty.
  [[nodiscard]] Device& device() const { return *data_.get_deleter().device; }

  void zero();
  /// Overwrites all of it from host memory of the same size.
  void assign(std::span<const std::byte> bytes);

  template <typename T>
  [[nodiscard]] std::span<T> as() {
    return {reinterpret_cast<T*>(data_.get()), static_cast<std::size_t>(bytes_) / sizeof(T)};
  }
  template <typename T>
  [[nodiscard]] std::span<const T> as() const {
    return {reinterpret_cast<const T*>(data_.get()), static_cast<std::size_t>(bytes_) / sizeof(T)};
  }

 private:
  DevicePtr data_;
  std::int64_t bytes_ = 0;
};

}  // namespace tandem
