// fake_device.h — a device with memory of its own that is the host's: what runs on it runs the
// paths that a GPU takes (padded batches, recordings, planned memory) under the CPU's ops and
// sanitizers.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "core/check.h"
#include "core/device.h"
#include "core/error.h"

namespace tandem::test {

class FakeDevice final : public Device {
 public:
  explicit FakeDevice(std::int64_t total_bytes = 64 << 20) : total_(total_bytes) {}
  ~FakeDevice() override {
    TDM_CHECK(buffers_.empty(), buffers_.size());  // all came back
  }

  std::int64_t fail_at = -1;  // the allocation that fails, counted from 0

  [[nodiscard]] bool host_visible() const override { return false; }

  /// Filled with NaN.
  [[nodiscard]] void* allocate(std::size_t bytes) override {
    const auto size = static_cast<std::int64_t>(bytes);
    if (counters_.allocations++ == fail_at || size > total_ - allocated_) {
      throw_error("fake device: allocating {} bytes, {} of {} are free", bytes, total_ - allocated_,
                  total_);
    }
    auto* const pointer =
        static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    std::memset(pointer, 0xFF, bytes);
    buffers_[pointer] = bytes;
    allocated_ += size;
    return pointer;
  }
  void release(void* pointer) noexcept override {
    const auto buffer = buffers_.find(static_cast<std::byte*>(pointer));
    TDM_CHECK(buffer != buffers_.end());
    allocated_ -= static_cast<std::int64_t>(buffer->second);
    buffers_.erase(buffer);
    std::free(pointer);
  }

  void upload(void* to, const void* from_host, std::size_t bytes) override {
    ++counters_.uploads;
    TDM_CHECK(owns(to, bytes) && !owns(from_host, 0));
    std::memcpy(to, from_host, bytes);
  }
  void download(void* to_host, const void* from, std::size_t bytes) override {
    ++counters_.downloads;
    ++counters_.waits;
    TDM_CHECK(owns(from, bytes) && !owns(to_host, 0));
    std::memcpy(to_host, from, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    ++counters_.launches;
    TDM_CHECK(owns(to, bytes) && owns(from, bytes));
    std::memcpy(to, from, bytes);
  }
  void zero(void* to, std::size_t bytes) override {
    ++counters_.launches;
    TDM_CHECK(owns(to, bytes));
    std::memset(to, 0, bytes);
  }
  void synchronize() override { ++counters_.waits; }

  [[nodiscard]] std::unique_ptr<Recording> record(const std::function<void()>& ops) override {
    return std::make_unique<Replay>(*this, ops);
  }
  [[nodiscard]] std::string name() const override { return "a fake device"; }
  [[nodiscard]] std::optional<DeviceMemory> memory() const override {
    return DeviceMemory{total_, total_ - allocated_, allocated_};
  }
  [[nodiscard]] DeviceCounters counters() const override { return counters_; }

 private:
  class Replay final : public Recording {
   public:
    Replay(FakeDevice& device, const std::function<void()>& ops) : device_(device), ops_(ops) {}
    void launch() override {
      ++device_.counters_.recorded_launches;
      ops_();
    }
    [[nodiscard]] std::int64_t num_ops() const override { return 1; }

   private:
    FakeDevice& device_;
    std::function<void()> ops_;
  };

  [[nodiscard]] bool owns(const void* pointer, std::size_t bytes) const {
    const auto* const at = static_cast<const std::byte*>(pointer);
    return std::ranges::any_of(buffers_, [&](const auto& buffer) {
      return at >= buffer.first && at + bytes <= buffer.first + buffer.second &&
             (bytes > 0 || at < buffer.first + buffer.second);
    });
  }

  std::int64_t total_;
  std::int64_t allocated_ = 0;
  DeviceCounters counters_;
  std::map<std::byte*, std::size_t> buffers_;
};

}  // namespace tandem::test
