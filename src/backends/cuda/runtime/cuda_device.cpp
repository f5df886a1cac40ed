#include "backends/cuda/runtime/cuda_device.h"

#include <cstring>

#include "backends/cuda/runtime/check.h"
#include "core/error.h"
#include "core/log.h"

namespace tandem::cuda {
namespace {

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
  }

 private:
  CudaDevice& device_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw_error("CUDA: {}: {}", what, cudaGetErrorString(status));
  }
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
  cudaStreamDestroy(stream_);
}

void* CudaDevice::allocate(std::size_t bytes) {
  void* pointer = nullptr;
  const cudaError_t status = options_.host_visible
                                 ? cudaHostAlloc(&pointer, bytes, cudaHostAllocMapped)
                                 : cudaMalloc(&pointer, bytes);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    static_cast<void>(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw_error("CUDA: allocating {} bytes on {}: {} ({} of {} bytes are free)", bytes, info_.name,
                cudaGetErrorString(status), free_bytes, total_bytes);
  }
  return pointer;
}

void CudaDevice::release(void* pointer) noexcept {
  // Whatever still reads the buffer was given to the stream before.
  const cudaError_t status = options_.host_visible ? cudaFreeHost(pointer) : cudaFree(pointer);
  if (status != cudaSuccess && status != cudaErrorCudartUnloading) {
    log_warn("cuda.free_failed", "{}", cudaGetErrorString(status));
  }
}

void CudaDevice::upload(void* to, const void* from_host, std::size_t bytes) {
  check(cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyDefault, stream_), "uploading");
  synchronize();
}

void CudaDevice::download(void* to_host, const void* from, std::size_t bytes) {
  check(cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDefault, stream_), "downloading");
  synchronize();
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
  check(cudaStreamSynchronize(stream_), "waiting for the GPU");
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
