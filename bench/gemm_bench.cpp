// gemm_bench.cpp — linear layers against OpenBLAS and against the machine's read bandwidth, all in
// one run: the two sides of a row alternate and the medians are compared, so that other load on the
// machine hits both alike.
//
//   OPENBLAS_NUM_THREADS=2 gemm_bench [threads] [part of a row's name] [avx2]
//
// With 1 thread times are CPU time of the thread: comparable even on a machine shared with others.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <cblas.h>
#include <fmt/format.h>
#include <hwy/targets.h>

#include "backends/cpu/cpu_backend.h"
#include "core/checked_cast.h"
#include "core/rng.h"
#include "ops/exec_ctx.h"
#include "ops/gemm.h"
#include "tensor/dtype.h"

namespace tandem {
namespace {

/// Wall time, or with one thread its CPU time.
double now(bool cpu_time) {
  timespec time{};
  clock_gettime(cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

constexpr int kRounds = 7;
constexpr double kRoundSeconds = 0.02;  // at least, a side and round
// Idle OpenBLAS workers spin for about 2^26 cycles; what follows them would share a core with them.
constexpr std::chrono::milliseconds kSettle{80};

double seconds_of(bool cpu_time, const std::function<void()>& fn, std::int64_t repeats) {
  const double start = now(cpu_time);
  for (std::int64_t i = 0; i < repeats; ++i) {
    fn();
  }
  return (now(cpu_time) - start) / static_cast<double>(repeats);
}

/// Median seconds of each function; the functions take turns.
std::vector<double> medians(bool cpu_time, const std::vector<std::function<void()>>& fns) {
  std::vector<std::int64_t> repeats;
  for (const auto& fn : fns) {
    fn();
    const double once = seconds_of(cpu_time, fn, 1);
    repeats.push_back(std::max<std::int64_t>(1, static_cast<std::int64_t>(kRoundSeconds / once)));
  }
  std::vector<std::vector<double>> samples(fns.size());
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < fns.size(); ++i) {
      std::this_thread::sleep_for(kSettle);
      fns[i]();
      samples[i].push_back(seconds_of(cpu_time, fns[i], repeats[i]));
    }
  }
  std::vector<double> result;
  for (auto& times : samples) {
    std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
    result.push_back(times[kRounds / 2]);
  }
  return result;
}

std::vector<float> random_floats(std::int64_t count, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> values(usize(count));
  for (float& value : values) {
    value = static_cast<float>(rng.uniform() - 0.5);
  }
  return values;
}

/// One weight in one format with plausible codes and scales.
struct Weight {
  std::vector<std::uint8_t> data;
  std::vector<std::uint8_t> scales;
  PackedWeight packed;
  std::int64_t bytes = 0;  // as a checkpoint counts them

  Weight(const ExecCtx& ctx, WeightFormat format, std::int64_t out, std::int64_t in) {
    Rng rng(7);
    const auto random_bytes = [&](std::int64_t count, std::uint64_t low, std::uint64_t high) {
      std::vector<std::uint8_t> values(usize(count));
      for (std::uint8_t& value : values) {
        value = static_cast<std::uint8_t>(low + rng.below(high - low + 1));
      }
      return values;
    };
    const auto as_bytes = [&](const auto& values) {
      const auto* from = reinterpret_cast<const std::uint8_t*>(values.data());
      return std::vector<std::uint8_t>(from, from + values.size() * sizeof(values[0]));
    };
    switch (format) {
      case WeightFormat::kF32:
        data = as_bytes(random_floats(out * in, 1));
        break;
      case WeightFormat::kBF16: {
        std::vector<BF16> values;
        for (const float value : random_floats(out * in, 1)) {
          values.push_back(BF16::from_float(value));
        }
        data = as_bytes(values);
        break;
      }
      case WeightFormat::kMxFp4:
        data = random_bytes(out * in / 2, 0, 255);
        scales = random_bytes(out * in / 32, 118, 122);
        break;
      case WeightFormat::kNvFp4:
        data = random_bytes(out * in / 2, 0, 255);
        scales = random_bytes(out * in / 16, 0x30, 0x40);
        break;
      case WeightFormat::kFp8Block:
        // Exponents of a bell curve under its block maximum; subnormals are as rare as there.
        data = random_bytes(out * in, 0x40, 0x7E);
        scales = as_bytes(std::vector<float>(usize((out + 127) / 128 * ((in + 127) / 128)), 1e-4F));
        break;
    }
    bytes = isize(data) + isize(scales);
    ops::pack(ctx, packed, {format, out, in, in, data.data(), scales.data(), 0.01F},
              Orientation::kNormal);
    data = {};
    scales = {};
  }
};

struct Bench {
  const ExecCtx& ctx;
  std::string filter;
  bool cpu_time;

  [[nodiscard]] bool wants(const std::string& name) const {
    return name.find(filter) != std::string::npos;
  }

  /// y[rows, out] = x W^T, ours and OpenBLAS.
  void square(const std::string& name, std::int64_t rows, std::int64_t out, std::int64_t in) const {
    if (!wants(name)) {
      return;
    }
    const std::vector<float> x = random_floats(rows * in, 2);
    const std::vector<float> w = random_floats(out * in, 3);
    std::vector<float> ours(usize(rows * out));
    std::vector<float> theirs(usize(rows * out));
    PackedWeight packed;
    ops::pack(ctx, packed, WeightRef::of(ConstF32Mat(w.data(), {out, in})), Orientation::kNormal);
    const std::vector<double> seconds =
        medians(cpu_time, {[&] {
                             ops::linear(ctx, F32Mat(ours.data(), {rows, out}),
                                         ConstF32Mat(x.data(), {rows, in}), packed);
                           },
                           [&] {
                             const auto m = checked_cast<int>(rows);
                             const auto n = checked_cast<int>(out);
                             const auto k = checked_cast<int>(in);
                             cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, 1.0F,
                                         x.data(), k, w.data(), k, 0.0F, theirs.data(), n);
                           }});
    print(name, 2.0 * static_cast<double>(rows * out * in), seconds);
  }

  /// d_w[out, in] += d_y^T x, ours and OpenBLAS.
  void gradient(const std::string& name, std::int64_t rows, std::int64_t out,
                std::int64_t in) const {
    if (!wants(name)) {
      return;
    }
    const std::vector<float> x = random_floats(rows * in, 2);
    const std::vector<float> d_y = random_floats(rows * out, 3);
    std::vector<float> ours(usize(out * in));
    std::vector<float> theirs(usize(out * in));
    const std::vector<double> seconds =
        medians(cpu_time, {[&] {
                             ops::weight_grad(ctx, F32Mat(ours.data(), {out, in}),
                                              ConstF32Mat(d_y.data(), {rows, out}),
                                              ConstF32Mat(x.data(), {rows, in}));
                           },
                           [&] {
                             const auto t = checked_cast<int>(rows);
                             const auto n = checked_cast<int>(out);
                             const auto k = checked_cast<int>(in);
                             cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n, k, t, 1.0F,
                                         d_y.data(), n, x.data(), k, 1.0F, theirs.data(), k);
                           }});
    print(name, 2.0 * static_cast<double>(rows * out * in), seconds);
  }

  static void print(const std::string& name, double flops, const std::vector<double>& seconds) {
    fmt::print("{:<26} {:>9.1f} us {:>8.1f} GFLOP/s   OpenBLAS {:>8.1f} GFLOP/s   {:>5.2f}x\n",
               name, 1e6 * seconds[0], 1e-9 * flops / seconds[0], 1e-9 * flops / seconds[1],
               seconds[1] / seconds[0]);
  }

  /// Few rows: GB/s on the bytes that a checkpoint counts.
  void few_rows(std::int64_t out, std::int64_t in, double bandwidth) const {
    constexpr std::pair<WeightFormat, const char*> kFormats[] = {{WeightFormat::kF32, "F32"},
                                                                 {WeightFormat::kBF16, "BF16"},
                                                                 {WeightFormat::kFp8Block, "FP8"},
                                                                 {WeightFormat::kMxFp4, "MXFP4"},
                                                                 {WeightFormat::kNvFp4, "NVFP4"}};
    for (const auto& [format, name] : kFormats) {
      if (!wants(name)) {
        continue;
      }
      const Weight weight(ctx, format, out, in);
      // Cycle through copies beyond the last-level cache, as a model's layers do; small shapes
      // would otherwise measure the cache.
      std::vector<PackedWeight> copies;
      const std::int64_t num_copies =
          std::clamp<std::int64_t>((kCold << 20) / weight.bytes, 1, 1024);
      for (std::int64_t i = 0; i < num_copies; ++i) {
        copies.push_back({weight.packed.format, out, in, weight.packed.scale_2,
                          weight.packed.data.clone(), weight.packed.scales.clone()});
      }
      for (const std::int64_t rows : {1, 2, 4, 8, 16}) {
        const std::vector<float> x = random_floats(rows * in, 2);
        std::vector<float> y(usize(rows * out));
        std::size_t next = 0;
        const double seconds = medians(cpu_time, {[&] {
                                         ops::linear(ctx, F32Mat(y.data(), {rows, out}),
                                                     ConstF32Mat(x.data(), {rows, in}),
                                                     copies[next++ % copies.size()]);
                                       }})[0];
        const double speed = 1e-9 * static_cast<double>(weight.bytes) / seconds;
        fmt::print(
            "{:>5} x {:<5} {:<6} T={:<3} {:>9.1f} us {:>7.2f} GB/s {:>4.0f}% of read bandwidth "
            "{:>8.1f} GFLOP/s\n",
            out, in, name, rows, 1e6 * seconds, speed, 100 * speed / bandwidth,
            2e-9 * static_cast<double>(rows * out * in) / seconds);
      }
    }
  }

  static constexpr std::int64_t kCold = 512;  // MiB

  // One clone an instruction set, picked at run time.
  __attribute__((target_clones("avx512f", "avx2", "default"))) static std::uint64_t sum(
      const std::uint64_t* from, std::int64_t count) {
    std::uint64_t total = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      total += from[i];
    }
    return total;
  }

  /// GB/s of a sum over 1 GiB with all threads.
  [[nodiscard]] double read_bandwidth() const {
    constexpr std::int64_t kCount = std::int64_t{1} << 27;  // of 8 bytes
    constexpr std::int64_t kBlocks = 256;
    const std::vector<std::uint64_t> data(usize(kCount), 1);
    std::vector<std::uint64_t> sums(kBlocks);
    const double seconds = medians(cpu_time, {[&] {
                                     ctx.pool->parallel_for(kBlocks, [&](std::int64_t block, int) {
                                       constexpr std::int64_t kPart = kCount / kBlocks;
                                       sums[usize(block)] = sum(data.data() + block * kPart, kPart);
                                     });
                                   }})[0];
    return 8e-9 * static_cast<double>(kCount) / seconds;
  }
};

void run(int threads, const std::string& filter) {
  ThreadPool pool(threads);
  Arena arena;
  const ExecCtx ctx{&cpu_backend(), &pool, &arena, nullptr};
  const Bench bench{ctx, filter, threads == 1};
  fmt::print("{} threads; OpenBLAS {} ({}), {} threads\n", pool.num_threads(),
             openblas_get_config(), openblas_get_corename(), openblas_get_num_threads());
  for (const std::int64_t n : {64, 128, 256, 512, 1024, 2048}) {
    bench.square(fmt::format("{}^3", n), n, n, n);
  }
  // Every [out, in] of k3-nano with the demo's vocabulary, but for the few-row b_proj and router.
  constexpr std::pair<std::int64_t, std::int64_t> kDemo[] = {
      {128, 128}, {256, 128}, {128, 256}, {64, 128}, {128, 64},
      {192, 64},  {80, 128},  {32, 128},  {128, 32}, {154, 128}};
  for (const std::int64_t rows : {2048, 256}) {
    for (const auto& [out, in] : kDemo) {
      bench.square(fmt::format("T={} N={} K={}", rows, out, in), rows, out, in);
    }
  }
  for (const auto& [out, in] : kDemo) {
    bench.gradient(fmt::format("dW T=2048 N={} K={}", out, in), 2048, out, in);
  }
  const double bandwidth = bench.read_bandwidth();
  fmt::print("read bandwidth {:.1f} GB/s\n", bandwidth);
  for (const std::int64_t out : {1024, 4096, 32768}) {
    bench.few_rows(out, 1024, bandwidth);
  }
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  if (argc > 3 && std::string_view(argv[3]) == "avx2") {
    hwy::SetSupportedTargetsForTest(HWY_AVX2);  // what a machine without AVX-512 would run
    hwy::GetChosenTarget().Update(HWY_AVX2);
  }
  tandem::run(argc > 1 ? std::atoi(argv[1]) : 2, argc > 2 ? argv[2] : "");
}
