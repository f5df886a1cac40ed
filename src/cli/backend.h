// backend.h — from the name of a device to its op table and memory. Two sources implement it: one
// for builds with CUDA, one for builds without.
#pragma once

#include <memory>
#include <string>

#include "core/arena.h"
#include "core/device.h"
#include "core/error.h"
#include "ops/op_table.h"

namespace tandem::cli {

struct Backend {
  const OpTable* ops = nullptr;
  std::unique_ptr<Device> device;  // null: the host

  [[nodiscard]] Device& memory() const { return device ? *device : host_device(); }
  /// Larger blocks on a GPU, where an allocation is dear and memory is plenty.
  [[nodiscard]] Arena workspace() const {
    return Arena(std::size_t{device ? 64U : 4U} << 20, memory());
  }
};

struct DeviceOptions {
  std::string name = "cpu";  // cpu, cuda (the first GPU) or cuda:N
  bool deterministic = false;
  bool no_dependent_launch = false;
  double memory_gib = 0;  // the most to allocate on a GPU; 0: all there is
};

/// Empty when `name` has one of the forms above; else what was expected. No device is touched.
[[nodiscard]] std::string check_device_name(const std::string& name);
/// Errors: throws Error when this build or this machine does not have the device.
[[nodiscard]] Backend open_backend(const DeviceOptions& options);

/// N of cuda:N; -1 for cpu.
[[nodiscard]] int gpu_of(const std::string& name);

}  // namespace tandem::cli
