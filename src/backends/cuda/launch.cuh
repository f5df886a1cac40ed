// launch.cuh — how every kernel here is launched, how it begins, and its dynamic shared memory.
//
// Launches are programmatic dependent ones: a kernel may become resident while the one before it
// still runs, so that a chain of short kernels does not pay a launch latency for each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "backends/cuda/ptx/griddepcontrol.cuh"
#include "backends/cuda/runtime/check.h"
#include "backends/cuda/runtime/cuda_device.h"

namespace tandem::cuda {

struct Launch {
  dim3 grid;
  dim3 block;
  std::int64_t smem_bytes = 0;  // dynamic
  int cluster = 1;              // CTAs along x
  bool writes_weights = false;  // what other kernels read before begin_kernel()
};

/// Shared memory of an SM that every launch asks for whose blocks need no more. An SM changes the
/// split between shared memory and its cache only while it is idle: of two kernels that want unlike
/// splits, the second one cannot become resident beside the first.
inline constexpr std::int64_t kUsualSmem = 64 * 1024;

/// Whether that is enough for the launch's blocks of an SM.
[[nodiscard]] inline bool takes_usual_smem(const void* kernel, const Launch& how,
                                           const DeviceInfo& info) {
  constexpr std::int64_t kOfSystem = 1024;  // a block's
  constexpr std::int64_t kThreadsOfSm = 2048;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "kernel attributes");
  const auto size = [](const dim3& d) { return std::int64_t{d.x} * d.y * d.z; };
  const std::int64_t blocks =
      std::min((size(how.grid) + info.num_sms - 1) / info.num_sms, kThreadsOfSm / size(how.block));
  const auto own = static_cast<std::int64_t>(attributes.sharedSizeBytes);
  return blocks * (how.smem_bytes + own + kOfSystem) <= kUsualSmem;
}

/// Launches `kernel`, which begins with begin_kernel(), on the context's stream.
/// Errors: throws Error when CUDA refuses the launch; `op` says which it was.
template <typename... Params>
void launch(const ExecCtx& ctx, const char* op, void (*kernel)(Params...), const Launch& how,
            const std::type_identity_t<Params>&... args) {
  constexpr std::int64_t kWithoutAsking = 48 * 1024;
  CudaDevice& device = device_of(ctx);
  if (how.smem_bytes > kWithoutAsking) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(how.smem_bytes)),
          op);
  }
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = static_cast<std::size_t>(how.smem_bytes);
  config.stream = device.stream();
  config.attrs = attributes;
  if (device.options().dependent_launch && !device.exchange_weights_written(how.writes_weights)) {
    cudaLaunchAttribute& dependent = attributes[config.numAttrs++];
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
  }
  if (how.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(how.cluster);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  if (takes_usual_smem(reinterpret_cast<const void*>(kernel), how, device.info())) {
    cudaLaunchAttribute& split = attributes[config.numAttrs++];
    split.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    split.val.sharedMemCarveout =
        static_cast<unsigned>(kUsualSmem * 100 / device.info().smem_per_sm);
  }
  check(cudaLaunchKernelEx(&config, kernel, args...), op);
  device.launched(op);
}

/// Every thread of every kernel calls this before it may return, and before it reads or writes
/// global memory; what may be read sooner is weights (the kernel after one with `writes_weights`
/// starts when that has ended) and what was written before the kernel before began. Waits for the
/// kernel before, then lets the one after start. The trigger comes this early because the one after
/// waits too, and no earlier, so that the kernel before the one before has ended when a kernel
/// starts. Since every kernel waits, the end of one implies the end of all before it; a kernel
/// whose CTAs could end without waiting would break that.
__device__ __forceinline__ void begin_kernel() {
  ptx::wait_for_predecessor();
  ptx::let_successor_start();
}

/// The dynamic shared memory of a kernel.
template <typename T>
__device__ __forceinline__ T* dynamic_smem() {
  extern __shared__ __align__(128) unsigned char tandem_smem[];
  return reinterpret_cast<T*>(tandem_smem);
}

}  // namespace tandem::cuda
