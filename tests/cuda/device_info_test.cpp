// What the backend makes of a GPU's attributes, asked of GPUs that are not here.
#include "backends/cuda/runtime/device_info.h"

#include <map>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace tandem::cuda {
namespace {

/// A GPU as a table; fails the test when an attribute is asked for that only capability 10.7 knows.
class FakeGpu final : public AttributeProvider {
 public:
  FakeGpu(std::string name, int major, int minor, int num_sms, int smem)
      : name_(std::move(name)),
        values_{{cudaDevAttrComputeCapabilityMajor, major},
                {cudaDevAttrComputeCapabilityMinor, minor},
                {cudaDevAttrMultiProcessorCount, num_sms},
                {kAttrSmemPerBlockOptin, smem},
                {cudaDevAttrCanMapHostMemory, 1}} {}

  void set(int number, int value) { values_[number] = value; }
  [[nodiscard]] std::optional<int> attribute(int number) const override {
    const bool is_rubin = values_.at(cudaDevAttrComputeCapabilityMajor) == 10 &&
                          values_.at(cudaDevAttrComputeCapabilityMinor) == 7;
    EXPECT_TRUE(number != kAttrOversizedSmemPerBlock || is_rubin) << name_;
    const auto found = values_.find(number);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] std::int64_t memory_bytes() const override { return std::int64_t{1} << 37; }

 private:
  std::string name_;
  std::map<int, int> values_;
};

TEST(DeviceInfo, AsksForTheOversizedLimitOnlyWhereThereIsOne) {
  const DeviceInfo h200 = read_device_info(FakeGpu("H200", 9, 0, 132, 232448));
  EXPECT_EQ(h200.num_sms, 132);
  EXPECT_EQ(h200.smem_per_block, 232448);
  EXPECT_EQ(h200.oversized_smem_per_block, 0);

  FakeGpu rubin("Rubin", 10, 7, 212, 232448);
  EXPECT_EQ(read_device_info(rubin).oversized_smem_per_block, 0);  // the driver does not know it
  rubin.set(kAttrOversizedSmemPerBlock, 334848);
  const DeviceInfo info = read_device_info(rubin);
  EXPECT_EQ(info.smem_per_block, 232448);
  EXPECT_EQ(info.oversized_smem_per_block, 334848);
}

TEST(DeviceInfo, KnowsThePeakOfHopper) {
  FakeGpu h100("H100", 9, 0, 132, 232448);
  h100.set(cudaDevAttrClockRate, 1'830'000);
  EXPECT_NEAR(1e-12 * peak_flops(read_device_info(h100)), 989.4, 1.0);  // its data sheet
  EXPECT_EQ(peak_flops(read_device_info(FakeGpu("RTX", 12, 0, 84, 101376))), 0.0);
}

TEST(DeviceInfo, RefusesWhatTheKernelsCannotRunOnByName) {
  EXPECT_EQ(unsupported_reason(read_device_info(FakeGpu("H200", 9, 0, 132, 232448))), std::nullopt);
  EXPECT_EQ(unsupported_reason(read_device_info(FakeGpu("RTX", 12, 0, 84, 101376))), std::nullopt);
  const auto too_old = unsupported_reason(read_device_info(FakeGpu("A100", 8, 0, 108, 166912)));
  ASSERT_TRUE(too_old.has_value());
  EXPECT_NE(too_old->find("A100 has compute capability 8.0"), std::string::npos) << *too_old;
  FakeGpu unmapped("Odd", 9, 0, 132, 232448);
  unmapped.set(cudaDevAttrCanMapHostMemory, 0);
  EXPECT_TRUE(unsupported_reason(read_device_info(unmapped)).has_value());
}

}  // namespace
}  // namespace tandem::cuda
