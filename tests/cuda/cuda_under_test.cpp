// The op, model, engine and training tests on the CUDA backend, unchanged: whatever `new` gives
// and the stack that tests run on lie in page-locked memory, which the GPU reads and writes under
// the host's own addresses.
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include "backends/cuda/cuda_backend.h"
#include "support/backend_under_test.h"

namespace tandem::test {
namespace {

/// Page-locked memory in blocks of powers of two; a freed block waits for the next of its size.
/// Before start(), while static objects are made, it gives ordinary memory: the sanitizer wants to
/// be there before CUDA is.
class PinnedHeap {
 public:
  void start() { started_ = true; }

  void* take(std::size_t bytes) {
    if (!started_) {
      return std::malloc(bytes);
    }
    const std::lock_guard lock(mutex_);
    const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes + kHeader, 2 * kHeader));
    Block*& list = free_.at(class_of(size));
    if (list == nullptr) {
      auto* const block = reinterpret_cast<Block*>(carve(size));
      block->size = size;
      return reinterpret_cast<std::byte*>(block) + kHeader;
    }
    Block* const block = list;
    list = block->next;
    return reinterpret_cast<std::byte*>(block) + kHeader;
  }
  void give(void* pointer) {
    const std::lock_guard lock(mutex_);
    const bool is_ours = std::ranges::any_of(slabs_, [pointer](const Slab& slab) {
      return pointer >= slab.begin && pointer < slab.begin + slab.bytes;
    });
    if (!is_ours) {
      std::free(pointer);
      return;
    }
    auto* const block = reinterpret_cast<Block*>(static_cast<std::byte*>(pointer) - kHeader);
    Block*& list = free_.at(class_of(block->size));
    block->next = list;
    list = block;
  }

 private:
  static constexpr std::size_t kHeader = 64;  // keeps what follows aligned to 64 bytes
  static constexpr std::size_t kSlab = std::size_t{1} << 30;
  struct Block {
    std::size_t size;
    Block* next;
  };
  struct Slab {
    std::byte* begin = nullptr;
    std::size_t bytes = 0;
  };

  static std::size_t class_of(std::size_t size) {
    return static_cast<std::size_t>(std::countr_zero(size));
  }
  std::byte* carve(std::size_t size) {
    if (left_ < size) {
      const std::size_t bytes = std::max(size, kSlab);
      void* slab = nullptr;
      if (cudaHostAlloc(&slab, bytes, cudaHostAllocMapped) != cudaSuccess) {
        std::fputs("no page-locked memory: is there a GPU?\n", stderr);
        std::abort();
      }
      next_ = static_cast<std::byte*>(slab);
      left_ = bytes;
      Slab& entry = slabs_.at(num_slabs_++);
      entry = {next_, bytes};
    }
    std::byte* const result = next_;
    next_ += size;
    left_ -= size;
    return result;
  }

  bool started_ = false;  // by main, before there is a second thread
  std::mutex mutex_;
  std::array<Block*, 64> free_{};
  std::array<Slab, 256> slabs_{};
  std::size_t num_slabs_ = 0;
  std::byte* next_ = nullptr;
  std::size_t left_ = 0;
};

PinnedHeap& heap() {
  static PinnedHeap instance;
  return instance;
}

void* run_tests(void* result) {
  *static_cast<int*>(result) = RUN_ALL_TESTS();
  return nullptr;
}

}  // namespace

const OpTable& ops_under_test() {
  return cuda_backend();
}

/// TDM_TEST_TENSOR_CORES=1: the default arithmetic, for tests that compare ops with ops.
Device& device_under_test() {
  static const std::unique_ptr<Device> device = make_cuda_device(
      {.host_visible = true, .exact_linear = std::getenv("TDM_TEST_TENSOR_CORES") == nullptr});
  return *device;
}

}  // namespace tandem::test

void* operator new(std::size_t bytes) {
  return tandem::test::heap().take(bytes);
}
void operator delete(void* pointer) noexcept {
  if (pointer != nullptr) {
    tandem::test::heap().give(pointer);
  }
}
void operator delete(void* pointer, std::size_t) noexcept {
  operator delete(pointer);
}

int main(int argc, char** argv) {
  tandem::test::heap().start();
  testing::InitGoogleTest(&argc, argv);
  constexpr std::size_t kStack = std::size_t{64} << 20;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstack(&attributes, operator new(kStack), kStack);
  pthread_t thread{};
  int result = 1;
  if (pthread_create(&thread, &attributes, tandem::test::run_tests, &result) != 0) {
    std::fputs("cannot start a thread on a page-locked stack\n", stderr);
    return 1;
  }
  pthread_join(thread, nullptr);
  return result;
}
