#include "backends/cpu/cpu_backend.h"
#include "cli/backend.h"

namespace tandem::cli {

Backend open_backend(const DeviceOptions& options) {
  if (gpu_of(options.name) >= 0) {
    throw_error(
        "--device {}: this build has no CUDA backend; build one with cmake --preset cuda-release",
        options.name);
  }
  return {&cpu_backend(), nullptr};
}

}  // namespace tandem::cli
