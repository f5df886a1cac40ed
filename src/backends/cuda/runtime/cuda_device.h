// cuda_device.h — one GPU as a Device: its memory, one stream for all work, and graphs.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include <cuda_runtime_api.h>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/runtime/device_info.h"
#include "core/device.h"
#include "ops/exec_ctx.h"

namespace tandem::cuda {

class CudaDevice final : public Device {
 public:
  /// Errors: throws Error when there is no such GPU, or it lacks what the kernels need.
  explicit CudaDevice(const CudaOptions& options);
  ~CudaDevice() override;

  [[nodiscard]] bool host_visible() const override { return options_.host_visible; }
  [[nodiscard]] void* allocate(std::size_t bytes) override;
  void release(void* pointer) noexcept override;
  void upload(void* to, const void* from_host, std::size_t bytes) override;
  void download(void* to_host, const void* from, std::size_t bytes) override;
  void copy(void* to, const void* from, std::size_t bytes) override;
  void zero(void* to, std::size_t bytes) override;
  void synchronize() override;
  [[nodiscard]] std::unique_ptr<Recording> record(const std::function<void()>& ops) override;
  [[nodiscard]] std::string name() const override { return info_.name; }
  [[nodiscard]] double peak_flops() const override { return cuda::peak_flops(info_); }
  [[nodiscard]] std::optional<DeviceMemory> memory() const override;
  [[nodiscard]] DeviceCounters counters() const override { return counters_; }
  std::vector<TraceEvent> trace(const std::function<void()>& ops) override;

  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  [[nodiscard]] const DeviceInfo& info() const { return info_; }
  [[nodiscard]] const CudaOptions& options() const { return options_; }

  /// After a launch: reports what it did wrong, and in host-visible mode waits for it.
  void launched(const char* op);
  /// Whether the kernel launched last wrote weights; from now on, whether the next one does.
  [[nodiscard]] bool exchange_weights_written(bool written) {
    return std::exchange(weights_written_, written);
  }
  void launched_recording() {
    ++counters_.recorded_launches;
    last_op_ = "a recorded step";
  }

 private:
  [[nodiscard]] std::byte* stage(std::size_t bytes);
  [[nodiscard]] DeviceMemory read_memory() const;
  void wait();

  CudaOptions options_;
  DeviceInfo info_;
  cudaStream_t stream_ = nullptr;
  DeviceCounters counters_;
  const char* last_op_ = "nothing";
  bool weights_written_ = false;
  bool free_failed_ = false;
  std::unordered_map<void*, std::size_t> allocated_;  // bytes by pointer
  std::int64_t allocated_bytes_ = 0;
  // Page-locked memory that small transfers go through, so that an upload need not wait. What the
  // device may still read of it lies below staged_; a wait frees all.
  std::byte* staging_ = nullptr;
  std::size_t staged_ = 0;
};

/// The device of a context whose table is cuda_backend().
[[nodiscard]] inline CudaDevice& device_of(const ExecCtx& ctx) {
  return static_cast<CudaDevice&>(*ctx.device);
}
[[nodiscard]] inline cudaStream_t stream_of(const ExecCtx& ctx) {
  return device_of(ctx).stream();
}

}  // namespace tandem::cuda
