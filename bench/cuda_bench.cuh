// cuda_bench.cuh — what the CUDA benchmarks share: a device, random numbers made on it, the time of
// a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/runtime/check.h"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/arena.h"
#include "tensor/storage.h"

namespace tandem::cuda::bench {

constexpr std::int64_t kRotatedBytes = std::int64_t{400} << 20;  // several times any L2 cache
constexpr int kReplays = 5;
constexpr int kThreads = 256;

__device__ inline std::uint32_t hash(std::uint64_t i, std::uint32_t seed) {
  std::uint64_t z = (i + (std::uint64_t{seed} << 40)) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<std::uint32_t>(z >> 32);
}

/// What a 32-bit word of random bits becomes.
enum class Fill { kBf16, kE4m3, kFp4, kE4m3Scales, kE8m0Scales, kFp32Scales, kActivations };

__device__ inline std::uint32_t filled(Fill fill, std::uint32_t h) {
  switch (fill) {
    case Fill::kBf16:  // magnitudes 2^-9 .. 2^-7
      return (h & 0x83FF83FFU) | 0x3B003B00U;
    case Fill::kE4m3:  // no NaN: not all of the low seven bits set
      return h & 0xFDFDFDFDU;
    case Fill::kFp4:
      return h;
    case Fill::kE4m3Scales:  // 0.25 .. 3.75
      return (h & 0x1F1F1F1FU) + 0x28282828U;
    case Fill::kE8m0Scales:  // 2^-7 .. 1
      return (h & 0x07070707U) + 0x78787878U;
    case Fill::kFp32Scales:
      return __float_as_uint(0.001F + static_cast<float>(h) * 0x1p-40F);
    case Fill::kActivations:
      return __float_as_uint(static_cast<float>(h) * 0x1p-31F - 1.0F);
  }
  return 0;
}

__global__ void fill_kernel(std::uint32_t* to, std::int64_t words, Fill fill, std::uint32_t seed) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words; i += step) {
    to[i] = filled(fill, hash(static_cast<std::uint64_t>(i), seed));
  }
}

/// Counts words that differ.
__global__ void __launch_bounds__(kThreads)
    differ_kernel(const std::uint32_t* a, const std::uint32_t* b, std::int64_t words,
                  unsigned* count) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words; i += step) {
    if (a[i] != b[i]) {
      atomicAdd(count, 1U);
    }
  }
}

struct Bench {
  CudaDevice device{CudaOptions{}};
  Arena workspace{std::size_t{640} << 20, device};
  ExecCtx ctx;

  Bench() {
    ctx.ops = &cuda_backend();
    ctx.workspace = &workspace;
    ctx.device = &device;
  }
  void fill(void* to, std::int64_t bytes, Fill what, std::uint32_t seed) {
    fill_kernel<<<1024, kThreads, 0, device.stream()>>>(static_cast<std::uint32_t*>(to), bytes / 4,
                                                        what, seed);
    device.launched("fill");
  }
  void fill(Storage& to, Fill what, std::uint32_t seed) {
    fill(to.data(), to.size_bytes(), what, seed);
  }
};

/// Microseconds a call: the best replay of a graph of calls(0), calls(1), ...
template <typename Call>
double time_us(Bench& b, int calls, const Call& call) {
  for (int i = 0; i < 2; ++i) {
    call(i);  // the workspace grows now, not while recording
  }
  b.device.synchronize();
  const auto recording = b.device.record([&] {
    for (int i = 0; i < calls; ++i) {
      call(i);
    }
  });
  cudaEvent_t begin{};
  cudaEvent_t end{};
  check(cudaEventCreate(&begin), "creating an event");
  check(cudaEventCreate(&end), "creating an event");
  float best = 1e30F;
  for (int i = 0; i <= kReplays; ++i) {
    check(cudaEventRecord(begin, b.device.stream()), "recording an event");
    recording->launch();
    check(cudaEventRecord(end, b.device.stream()), "recording an event");
    check(cudaEventSynchronize(end), "waiting for an event");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "reading an event");
    best = i == 0 ? 1e30F : std::min(best, ms);  // the first one uploads
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best * 1e3 / calls;
}

/// The exit status of a benchmark; says what went wrong.
template <typename Run>
int run_bench(const char* name, const Run& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 1;
  }
}

}  // namespace tandem::cuda::bench
