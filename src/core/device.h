// device.h — where buffers live and where ops run. The host is the default; a backend for an
// accelerator gives its own. Work given to a device runs in the order it was given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tandem {

/// What a device was asked for since it was made.
struct DeviceCounters {
  std::int64_t allocations = 0;
  std::int64_t uploads = 0;
  std::int64_t downloads = 0;
  std::int64_t waits = 0;              // times the host waited for the device, downloads included
  double wait_seconds = 0;             // the host spent in them
  std::int64_t launches = 0;           // kernels, copies and fills, given or recorded one by one
  std::int64_t recorded_launches = 0;  // recordings launched as a whole
};

/// Bytes of a device that has memory of its own.
struct DeviceMemory {
  std::int64_t total = 0;
  std::int64_t free = 0;       // what allocate() can still give
  std::int64_t allocated = 0;  // by allocate(), not yet released
};

/// Something that happened while a device was traced, on one clock in nanoseconds.
struct TraceEvent {
  enum class Kind {
    kKernel,
    kCopy,
    kFill,
    kCall  // the host called the device's library
  };
  Kind kind = Kind::kKernel;
  std::string name;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t bytes = 0;  // of a copy or fill
};

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
  /// `ops` must not allocate, download or synchronize. The recording may keep a copy of it: it
  /// holds what it needs by value, or by reference to what outlives the recording.
  [[nodiscard]] virtual std::unique_ptr<Recording> record(const std::function<void()>& ops) = 0;

  /// For people: "NVIDIA H200".
  [[nodiscard]] virtual std::string name() const = 0;
  /// The most products of a multiplication it can add up in a second, times two; 0: not known.
  [[nodiscard]] virtual double peak_flops() const { return 0; }
  /// nullopt where memory is the host's.
  [[nodiscard]] virtual std::optional<DeviceMemory> memory() const { return std::nullopt; }
  /// All zero where nothing is counted.
  [[nodiscard]] virtual DeviceCounters counters() const { return {}; }
  /// Runs `ops` and waits; then all that the device and its library did meanwhile, by start. Empty
  /// where a device cannot tell. Errors: throws Error when what a trace needs is not installed.
  virtual std::vector<TraceEvent> trace(const std::function<void()>& ops) {
    ops();
    synchronize();
    return {};
  }
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
