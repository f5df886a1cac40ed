#include "cli/roofs.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include <fmt/format.h>

#include "core/check.h"
#include "core/checked_cast.h"
#include "core/timing.h"
#include "tensor/storage.h"

namespace tandem::cli {
namespace {

constexpr int kSamples = 7;

double copy_bandwidth(Device& device) {
  const std::int64_t bytes = std::int64_t{2} << 30;
  Storage from(bytes, device);
  Storage to(bytes, device);
  const std::vector<float> values(std::size_t{1} << 20, 1.25F);
  const std::int64_t piece = isize(values) * 4;
  for (std::int64_t at = 0; at < bytes; at += piece) {
    device.upload(from.data() + at, values.data(), usize(piece));
  }
  std::vector<double> seconds;
  for (int i = 0; i < kSamples; ++i) {
    device.synchronize();
    const auto start = Clock::now();
    device.copy(to.data(), from.data(), usize(bytes));
    device.synchronize();
    seconds.push_back(seconds_since(start));
  }
  return 2.0 * static_cast<double>(bytes) / median(seconds);
}

double read_bandwidth(ThreadPool& pool) {
  constexpr std::int64_t kBlocks = 256;
  Storage data(std::int64_t{1} << 30);
  const std::span<std::uint64_t> words = data.as<std::uint64_t>();
  std::ranges::fill(words, 1U);
  const std::size_t block = words.size() / kBlocks;
  std::vector<std::uint64_t> sums(kBlocks);
  std::vector<double> seconds;
  for (int i = 0; i < kSamples; ++i) {
    const auto start = Clock::now();
    pool.parallel_for(kBlocks, [&](std::int64_t b, int) {
      constexpr std::size_t kLanes = 16;  // independent sums, so that additions do not wait
      std::uint64_t lanes[kLanes] = {};
      const std::uint64_t* const from = words.data() + usize(b) * block;
      for (std::size_t at = 0; at < block; at += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
          lanes[lane] += from[at + lane];
        }
      }
      sums[usize(b)] = std::accumulate(std::begin(lanes), std::end(lanes), std::uint64_t{0});
    });
    seconds.push_back(seconds_since(start));
    TDM_CHECK(std::accumulate(sums.begin(), sums.end(), std::uint64_t{0}) == words.size());
  }
  return static_cast<double>(data.size_bytes()) / median(seconds);
}

}  // namespace

Roofs measure_roofs(const ExecCtx& ctx) {
  Device& device = *ctx.device;
  return {device.host_visible() ? read_bandwidth(*ctx.pool) : copy_bandwidth(device),
          device.peak_flops()};
}

std::string describe(const Roofs& roofs, const Device& device) {
  std::string text =
      fmt::format("{:.0f} GB/s ({})", 1e-9 * roofs.bytes_per_s,
                  device.host_visible() ? "reading with all threads" : "copying inside the device");
  if (roofs.flops_per_s > 0) {
    text += fmt::format(", {:.0f} TFLOP/s (bf16 tensor cores at the highest clock)",
                        1e-12 * roofs.flops_per_s);
  }
  return text;
}

}  // namespace tandem::cli
