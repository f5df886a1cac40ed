// launch.cuh — launches of kernels with dynamic shared memory and clusters, and their shared
// memory.
#pragma once

#include <cstdint>

#include "backends/cuda/runtime/check.h"
#include "backends/cuda/runtime/cuda_device.h"

namespace tandem::cuda {

struct Launch {
  dim3 grid;
  int threads = 0;
  std::int64_t smem_bytes = 0;
  int cluster = 1;  // CTAs along x
};

template <typename Args>
void launch(const ExecCtx& ctx, const char* op, void (*kernel)(Args), const Launch& how,
            const Args& args) {
  constexpr std::int64_t kWithoutAsking = 48 * 1024;
  if (how.smem_bytes > kWithoutAsking) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(how.smem_bytes)),
          op);
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(how.cluster);
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = dim3(static_cast<unsigned>(how.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(how.smem_bytes);
  config.stream = stream_of(ctx);
  config.attrs = &cluster;
  config.numAttrs = how.cluster > 1 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, args), op);
  device_of(ctx).launched(op);
}

/// The dynamic shared memory of a kernel.
template <typename T>
__device__ __forceinline__ T* dynamic_smem() {
  extern __shared__ __align__(128) unsigned char tandem_smem[];
  return reinterpret_cast<T*>(tandem_smem);
}

}  // namespace tandem::cuda
