// device_info.h — what a GPU is, read once. Choosers take it as an argument, so that they can be
// asked about a GPU that is not here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tandem::cuda {

struct DeviceInfo {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  int num_sms = 0;
  std::int64_t smem_per_block = 0;  // most dynamic shared memory a block may ask for, bytes
  std::int64_t oversized_smem_per_block = 0;  // in the oversized mode of capability 10.7; 0: none.
                                              // No kernel is launched in that mode yet
  std::int64_t smem_per_sm = 0;
  std::int64_t l2_bytes = 0;
  std::int64_t memory_bytes = 0;
  int clock_khz = 0;                // the highest of the SMs
  bool host_memory_mapped = false;  // the host's pointers are valid on the device
};

/// Device attributes by number; a test gives its own. nullopt: the device does not know it.
class AttributeProvider {
 public:
  AttributeProvider() = default;
  AttributeProvider(const AttributeProvider&) = delete;
  AttributeProvider& operator=(const AttributeProvider&) = delete;
  virtual ~AttributeProvider() = default;
  [[nodiscard]] virtual std::optional<int> attribute(int number) const = 0;
  [[nodiscard]] virtual std::string name() const = 0;
  [[nodiscard]] virtual std::int64_t memory_bytes() const = 0;
};

/// Attributes as cudaDeviceAttr numbers them, and one that CUDA 13.0's headers do not name yet.
inline constexpr int kAttrSmemPerBlockOptin = 97;
inline constexpr int kAttrOversizedSmemPerBlock = 150;

/// Attribute 150 is asked for on capability 10.7 alone: elsewhere the query is an error.
/// Source: spec/decode-kernels.md 12.2.
[[nodiscard]] DeviceInfo read_device_info(const AttributeProvider& provider);

/// Of dense bf16 products on all tensor cores at the highest clock; 0 for GPUs whose rate an SM is
/// not known here.
[[nodiscard]] double peak_flops(const DeviceInfo& info);

/// The sentence that says what this GPU lacks for tandem's kernels; nullopt when nothing.
[[nodiscard]] std::optional<std::string> unsupported_reason(const DeviceInfo& info);

}  // namespace tandem::cuda
