#include "core/device.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace tandem {
namespace {

class HostDevice final : public Device {
 public:
  [[nodiscard]] bool host_visible() const override { return true; }

  [[nodiscard]] void* allocate(std::size_t bytes) override {
    constexpr std::size_t kAlignment = 256;
    void* pointer =
        std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (pointer == nullptr) {
      throw std::bad_alloc();
    }
    return pointer;
  }
  void release(void* pointer) noexcept override { std::free(pointer); }

  void upload(void* to, const void* from_host, std::size_t bytes) override {
    copy(to, from_host, bytes);
  }
  void download(void* to_host, const void* from, std::size_t bytes) override {
    copy(to_host, from, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) {  // an empty buffer may be null, which memcpy does not take
      std::memcpy(to, from, bytes);
    }
  }
  void zero(void* to, std::size_t bytes) override {
    if (bytes > 0) {
      std::memset(to, 0, bytes);
    }
  }
  void synchronize() override {}
  [[nodiscard]] std::unique_ptr<Recording> record(const std::function<void()>&) override {
    return nullptr;
  }
  [[nodiscard]] std::string name() const override { return "the host"; }
};

}  // namespace

Device& host_device() {
  static HostDevice device;
  return device;
}

}  // namespace tandem
