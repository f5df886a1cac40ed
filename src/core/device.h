// device.h — where buffers live and where ops run. The host is the default; a backend for an
// accelerator gives its own. Work given to a device runs in the order it was given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace tandem {

/// Ops captured once and launched as a whole, on the buffers they were captured with.
class Recording {
 public:
  Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  virtual ~Recording() = default;
  virtual void launch() = 0;
  /// Kernels and copies in it.
  [[nodiscard]] virtual std::int64_t num_ops() const = 0;
};

/// Errors: what breaks in the environment (no memory left, a lost device) throws Error.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  /// Whether the host may read and write the memory itself; if so, no op is still running when a
  /// call returns.
  [[nodiscard]] virtual bool host_visible() const = 0;

  /// Uninitialised, aligned to 256 bytes.
  [[nodiscard]] virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* pointer) noexcept = 0;

  /// From host memory, which may be reused at once.
  virtual void upload(void* to, const void* from_host, std::size_t bytes) = 0;
  /// To host memory; complete on return, and so is all work given before.
  virtual void download(void* to_host, const void* from, std::size_t bytes) = 0;
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  virtual void zero(void* to, std::size_t bytes) = 0;
  virtual void synchronize() = 0;

  /// Captures what `ops` gives to the device instead of running it; null where a device cannot.
  /// `ops` must not allocate, download or synchronize.
  [[nodiscard]] virtual std::unique_ptr<Recording> record(const std::function<void()>& ops) = 0;
};

/// A buffer of a device, given back when it goes.
struct DeviceFree {
  Device* device = nullptr;
  void operator()(std::byte* pointer) const { device->release(pointer); }
};
using DevicePtr = std::unique_ptr<std::byte, DeviceFree>;

/// Ordinary memory. Stateless.
[[nodiscard]] Device& host_device();

}  // namespace tandem
