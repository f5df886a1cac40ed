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
  info.clock_khz = get(cudaDevAttrClockRate);
  info.memory_bytes = provider.memory_bytes();
  info.host_memory_mapped = get(cudaDevAttrCanMapHostMemory) != 0;
  return info;
}

double peak_flops(const DeviceInfo& info) {
  // Dense bf16 with fp32 sums, a clock and an SM: 989.4 TFLOP/s of the H100 SXM's data sheet are
  // 132 SMs at 1.83 GHz; 2,250 of the B200's are 148 at 1.85.
  const double per_sm = info.major == 9 ? 4096 : info.major == 10 ? 8192 : 0;
  return per_sm * info.num_sms * 1e3 * info.clock_khz;
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
