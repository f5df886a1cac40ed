#include "backends/cuda/runtime/cuda_device.h"

#include <algorithm>
#include <cstring>

#include "backends/cuda/runtime/check.h"
#include "backends/cuda/runtime/kernel_trace.h"
#include "core/error.h"
#include "core/log.h"
#include "core/timing.h"

namespace tandem::cuda {
namespace {

constexpr std::size_t kStagingBytes = std::size_t{4} << 20;
constexpr std::size_t kMostStaged = kStagingBytes / 4;  // larger transfers go by themselves

class RuntimeAttributes final : public AttributeProvider {
 public:
  explicit RuntimeAttributes(int ordinal) : ordinal_(ordinal) {
    check(cudaGetDeviceProperties(&properties_, ordinal), "reading the GPU's properties");
  }
  [[nodiscard]] std::optional<int> attribute(int number) const override {
    int value = 0;
    if (cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(number), ordinal_) !=
        cudaSuccess) {
      static_cast<void>(cudaGetLastError());  // not sticky: the attribute is unknown here
      return std::nullopt;
    }
    return value;
  }
  [[nodiscard]] std::string name() const override { return properties_.name; }
  [[nodiscard]] std::int64_t memory_bytes() const override {
    return static_cast<std::int64_t>(properties_.totalGlobalMem);
  }

 private:
  int ordinal_;
  cudaDeviceProp properties_{};
};

class CudaRecording final : public Recording {
 public:
  CudaRecording(CudaDevice& device, cudaGraph_t graph) : device_(device), graph_(graph) {
    check(cudaGraphInstantiate(&exec_, graph_, 0), "instantiating a CUDA graph");
    check(cudaGraphUpload(exec_, device_.stream()), "uploading a CUDA graph");
  }
  ~CudaRecording() override {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
  }
  [[nodiscard]] std::int64_t num_ops() const override {
    std::size_t count = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &count), "counting the nodes of a CUDA graph");
    return static_cast<std::int64_t>(count);
  }
  void launch() override {
    check(cudaGraphLaunch(exec_, device_.stream()), "launching a CUDA graph");
    device_.launched_recording();
  }

 private:
  CudaDevice& device_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) {
    return;
  }
  static_cast<void>(cudaGetLastError());
  // After an error of a kernel or of the hardware every call gives that error again.
  const bool lost = status != cudaErrorMemoryAllocation && cudaFree(nullptr) == status;
  throw_error("CUDA: {}: {}{}", what, cudaGetErrorString(status),
              lost ? "; the GPU cannot be used by this process any more" : "");
}

CudaDevice::CudaDevice(const CudaOptions& options) : options_(options) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    throw_error("CUDA: no GPU, or no driver for one, on this machine");
  }
  if (options.ordinal < 0 || options.ordinal >= count) {
    throw_error("CUDA: GPU {} does not exist; this machine has {}", options.ordinal, count);
  }
  info_ = read_device_info(RuntimeAttributes(options.ordinal));
  if (const auto reason = unsupported_reason(info_)) {
    throw_error("CUDA: {}", *reason);
  }
  check(cudaSetDevice(options.ordinal), "selecting the GPU");
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
}

CudaDevice::~CudaDevice() {
  cudaFreeHost(staging_);
  cudaStreamDestroy(stream_);
}

void* CudaDevice::allocate(std::size_t bytes) {
  const auto left = options_.memory_limit - allocated_bytes_;
  const bool too_much = options_.memory_limit > 0 &&
                        static_cast<std::int64_t>(bytes) > std::max<std::int64_t>(left, 0);
  void* pointer = nullptr;
  const cudaError_t status = too_much ? cudaErrorMemoryAllocation
                             : options_.host_visible
                                 ? cudaHostAlloc(&pointer, bytes, cudaHostAllocMapped)
                                 : cudaMalloc(&pointer, bytes);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    const DeviceMemory memory = read_memory();
    throw_error("CUDA: allocating {} bytes on {}: {} ({} of {} bytes are free)", bytes, info_.name,
                cudaGetErrorString(status), memory.free, memory.total);
  }
  ++counters_.allocations;
  allocated_[pointer] = bytes;
  allocated_bytes_ += static_cast<std::int64_t>(bytes);
  return pointer;
}

void CudaDevice::release(void* pointer) noexcept {
  const auto entry = allocated_.find(pointer);
  if (entry != allocated_.end()) {
    allocated_bytes_ -= static_cast<std::int64_t>(entry->second);
    allocated_.erase(entry);
  }
  // Whatever still reads the buffer was given to the stream before.
  const cudaError_t status = options_.host_visible ? cudaFreeHost(pointer) : cudaFree(pointer);
  if (status != cudaSuccess && status != cudaErrorCudartUnloading && !free_failed_) {
    free_failed_ = true;  // a lost GPU gives nothing back: once is enough
    log_warn("cuda.free_failed", "{}", cudaGetErrorString(status));
  }
}

DeviceMemory CudaDevice::read_memory() const {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  static_cast<void>(cudaMemGetInfo(&free_bytes, &total_bytes));
  DeviceMemory memory{static_cast<std::int64_t>(total_bytes), static_cast<std::int64_t>(free_bytes),
                      allocated_bytes_};
  if (options_.memory_limit > 0) {
    memory.total = std::min(memory.total, options_.memory_limit);
    memory.free =
        std::clamp<std::int64_t>(options_.memory_limit - allocated_bytes_, 0, memory.free);
  }
  return memory;
}

std::optional<DeviceMemory> CudaDevice::memory() const {
  return options_.host_visible ? std::nullopt : std::optional(read_memory());
}

/// Room for a transfer between now and the next wait.
std::byte* CudaDevice::stage(std::size_t bytes) {
  if (staging_ == nullptr) {
    void* pointer = nullptr;
    check(cudaHostAlloc(&pointer, kStagingBytes, cudaHostAllocDefault), "page-locking memory");
    staging_ = static_cast<std::byte*>(pointer);
  }
  if (staged_ + bytes > kStagingBytes) {
    synchronize();
  }
  std::byte* const room = staging_ + staged_;
  staged_ += (bytes + 63) / 64 * 64;
  return room;
}

void CudaDevice::upload(void* to, const void* from_host, std::size_t bytes) {
  ++counters_.uploads;
  if (options_.host_visible || bytes > kMostStaged) {
    check(cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyDefault, stream_), "uploading");
    synchronize();
    return;
  }
  std::byte* const staged = stage(bytes);
  std::memcpy(staged, from_host, bytes);
  check(cudaMemcpyAsync(to, staged, bytes, cudaMemcpyHostToDevice, stream_), "uploading");
}

void CudaDevice::download(void* to_host, const void* from, std::size_t bytes) {
  ++counters_.downloads;
  if (options_.host_visible || bytes > kMostStaged) {
    check(cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDefault, stream_), "downloading");
    synchronize();
    return;
  }
  std::byte* const staged = stage(bytes);
  check(cudaMemcpyAsync(staged, from, bytes, cudaMemcpyDeviceToHost, stream_), "downloading");
  synchronize();
  std::memcpy(to_host, staged, bytes);
}

void CudaDevice::copy(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copying");
  launched("copy");
}

void CudaDevice::zero(void* to, std::size_t bytes) {
  check(cudaMemsetAsync(to, 0, bytes, stream_), "zeroing");
  launched("zero");
}

void CudaDevice::synchronize() {
  ++counters_.waits;
  wait();
  staged_ = 0;
}

/// What a kernel did wrong shows here; the last one given is the best hint there is.
void CudaDevice::wait() {
  const auto start = Clock::now();
  if (const cudaError_t status = cudaStreamSynchronize(stream_); status != cudaSuccess) {
    check(status, fmt::format("waiting for the GPU (given last: {})", last_op_).c_str());
  }
  counters_.wait_seconds += seconds_since(start);
}

std::vector<TraceEvent> CudaDevice::trace(const std::function<void()>& ops) {
  return trace_activity(ops, [this] { wait(); });
}

std::unique_ptr<Recording> CudaDevice::record(const std::function<void()>& ops) {
  if (options_.host_visible) {
    return nullptr;
  }
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "beginning a capture");
  cudaGraph_t graph = nullptr;
  try {
    ops();
  } catch (...) {
    cudaStreamEndCapture(stream_, &graph);
    if (graph != nullptr) {
      cudaGraphDestroy(graph);
    }
    throw;
  }
  check(cudaStreamEndCapture(stream_, &graph), "ending a capture");
  return std::make_unique<CudaRecording>(*this, graph);
}

void CudaDevice::launched(const char* op) {
  ++counters_.launches;
  last_op_ = op;
  check(cudaGetLastError(), op);
  if (options_.host_visible) {
    check(cudaStreamSynchronize(stream_), op);
  }
}

}  // namespace tandem::cuda

namespace tandem {

std::unique_ptr<Device> make_cuda_device(const CudaOptions& options) {
  return std::make_unique<cuda::CudaDevice>(options);
}

}  // namespace tandem
