#include "backends/cuda/runtime/device_info.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

namespace tandem::cuda {

DeviceInfo read_device_info(const AttributeProvider& provider) {
  const auto get = [&](int number) { return provider.attribute(number).value_or(0); };
  DeviceInfo info;
  info.name = provider.name();
  info.major = get(cudaDevAttrComputeCapabilityMajor);
  info.minor = get(cudaDevAttrComputeCapabilityMinor);
  info.num_sms = get(cudaDevAttrMultiProcessorCount);
  info.smem_per_block = get(kAttrSmemPerBlockOptin);
  if (info.major == 10 && info.minor == 7) {
    info.oversized_smem_per_block = get(kAttrOversizedSmemPerBlock);
  }
  info.smem_per_sm = get(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  info.l2_bytes = get(cudaDevAttrL2CacheSize);
  info.memory_bytes = provider.memory_bytes();
  info.host_memory_mapped = get(cudaDevAttrCanMapHostMemory) != 0;
  return info;
}

std::optional<std::string> unsupported_reason(const DeviceInfo& info) {
  if (info.major < 9) {
    return fmt::format(
        "{} has compute capability {}.{}; tandem's kernels need 9.0 (Hopper) or newer", info.name,
        info.major, info.minor);
  }
  if (!info.host_memory_mapped) {
    return fmt::format("{} cannot map host memory", info.name);
  }
  return std::nullopt;
}

}  // namespace tandem::cuda
