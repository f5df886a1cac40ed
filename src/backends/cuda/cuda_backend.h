// cuda_backend.h — the CUDA implementation of the op table, for Hopper and newer. Seen by cli/ and
// tests only. Views passed to its ops lie in the memory of a device from make_cuda_device().
#pragma once

#include <cstdint>
#include <memory>

#include "core/device.h"
#include "ops/op_table.h"

namespace tandem {

struct CudaOptions {
  int ordinal = 0;  // which GPU
  /// Buffers lie in page-locked host memory that the GPU reaches over the bus, and every op is
  /// waited for: slow, and whatever works on the host works unchanged. For tests and debugging.
  bool host_visible = false;
  /// Every weight format is multiplied as ops/gemm.h says, one fused multiply-add chain in fp32 an
  /// output, as on the CPU. Otherwise bf16 and packed weights go through the tensor cores with
  /// activations rounded to bf16; still independent of the batch.
  bool exact_linear = false;
  /// A kernel may start while the one before it ends. Off: to measure what that is worth.
  bool dependent_launch = true;
  /// The most bytes that may be allocated, for a GPU shared with others; 0: all there are.
  std::int64_t memory_limit = 0;
};

[[nodiscard]] const OpTable& cuda_backend();

/// Errors: throws Error when there is no such GPU or it is too old.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(const CudaOptions& options);

}  // namespace tandem
