#include "backends/cpu/cpu_backend.h"
#include "backends/cuda/cuda_backend.h"
#include "cli/backend.h"

namespace tandem::cli {

Backend open_backend(const DeviceOptions& options) {
  const int gpu = gpu_of(options.name);
  if (gpu < 0) {
    return {&cpu_backend(), nullptr};
  }
  constexpr double kGib = std::int64_t{1} << 30;
  return {&cuda_backend(),
          make_cuda_device({.ordinal = gpu,
                            .host_visible = false,
                            .exact_linear = options.deterministic,
                            .dependent_launch = !options.no_dependent_launch,
                            .memory_limit = static_cast<std::int64_t>(options.memory_gib * kGib)})};
}

}  // namespace tandem::cli
