// cuda_mla_bench — absorbed MLA over a paged cache by the Hopper kernel: batch, context and heads
// of K3's ranks, one query row a sequence and eight.
//   cuda_mla_bench [bf16] [fp8] [fp32] [BATCHxCONTEXTxHEADSxROWS ...]
// Random rows in shuffled pages of 64, rotated so that they come from memory; us is the best of
// several replays of a graph of many calls, divided by the calls, all launches of a call together.
// GB/s are those of the keys, read once; % is that of a pure read on an H200 (4,353 GB/s); peer is
// FlashMLA (commit 9241ae3, bf16, pages of 64) on the same kind of GPU: docs/perf.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "backends/cuda/mla/mla_decode_host.h"
#include "core/rng.h"
#include "cuda_bench.cuh"
#include "tensor/storage.h"

namespace tandem::cuda::bench {
namespace {

constexpr std::int64_t kPageSize = 64;
constexpr std::int64_t kDim = 576;
constexpr std::int64_t kLatent = 512;
constexpr double kReadGbs = 4353;

struct Shape {
  std::int64_t batch = 0, context = 0, heads = 0, rows = 1;
  double peer_us = 0;  // 0: not measured
};
constexpr Shape kShapes[] = {
    {1, 4096, 12, 1, 22.8},     {1, 32768, 12, 1, 41.7},    {1, 131072, 12, 1, 69.6},
    {1, 131072, 96, 1, 76.4},   {16, 8192, 12, 1, 46.0},    {16, 8192, 96, 1, 67.0},
    {16, 131072, 12, 1, 576.8}, {16, 131072, 96, 1, 971.5}, {64, 8192, 12, 1, 156.1},
    {64, 8192, 96, 1, 319.2},   {1, 256, 12, 1, 0},         {1, 256, 96, 1, 0},
    {64, 256, 12, 1, 0},        {1, 131072, 12, 8, 0},      {16, 131072, 12, 8, 0},
    {1, 131072, 96, 8, 0},      {1, 4096, 12, 4096, 0},     {1, 4096, 96, 4096, 0}};

[[nodiscard]] Storage uploaded(Bench& b, const std::vector<std::int32_t>& host) {
  Storage storage(static_cast<std::int64_t>(host.size()) * 4, b.device);
  b.device.upload(storage.data(), host.data(), host.size() * 4);
  return storage;
}

/// A call's inputs. Sets of pages are rotated.
struct Problem {
  Shape shape;
  LatentFormat format;
  std::int64_t pages;  // of a sequence
  std::int64_t sets;
  Storage rows, table, cu, lens, q, o;

  Problem(Bench& b, const Shape& s, LatentFormat as)
      : shape(s), format(as), pages((s.context + kPageSize - 1) / kPageSize) {
    const std::int64_t set_rows = s.batch * pages * kPageSize;
    const std::int64_t set_bytes = set_rows * kDim * element_bytes(format);
    sets = std::clamp<std::int64_t>((kRotatedBytes + set_bytes - 1) / set_bytes, 2, 32);
    rows = Storage(sets * set_bytes, b.device);
    b.fill(rows,
           format == LatentFormat::kBF16  ? Fill::kBf16
           : format == LatentFormat::kFp8 ? Fill::kE4m3
                                          : Fill::kActivations,
           1);
    std::vector<std::int32_t> order(static_cast<std::size_t>(sets * s.batch * pages));
    std::iota(order.begin(), order.end(), 0);
    Rng rng(1);
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(
          order[i - 1],
          order[std::min(static_cast<std::size_t>(rng.uniform() * static_cast<double>(i)), i - 1)]);
    }
    std::vector<std::int32_t> begins;
    for (std::int64_t i = 0; i <= s.batch; ++i) {
      begins.push_back(static_cast<std::int32_t>(i * s.rows));
    }
    table = uploaded(b, order);
    cu = uploaded(b, begins);
    lens = uploaded(b, std::vector<std::int32_t>(static_cast<std::size_t>(s.batch),
                                                 static_cast<std::int32_t>(s.context)));
    q = Storage(s.batch * s.rows * s.heads * kDim * 4, b.device);
    b.fill(q, Fill::kActivations, 2);
    o = Storage(s.batch * s.rows * s.heads * kLatent * 4, b.device);
  }

  [[nodiscard]] bool call(const ExecCtx& ctx, std::int64_t number) {
    const std::int64_t t = shape.batch * shape.rows;
    const ConstF32Cube queries(q.as<float>().data(), {t, shape.heads, kDim});
    const std::int64_t all_rows = sets * shape.batch * pages * kPageSize;
    MlaCacheView cache;
    cache.rows = ConstLatentRows(rows.data(), format, all_rows, kDim);
    cache.page_table = {table.as<std::int32_t>().data() + number % sets * shape.batch * pages,
                        {shape.batch, pages}};
    cache.page_size = kPageSize;
    return mla_decode(ctx, {o.as<float>().data(), {t, shape.heads, kLatent}}, {},
                      {queries.cols(0, kLatent), queries.cols(kLatent, kDim - kLatent)}, cache,
                      {{cu.as<std::int32_t>().data(), {shape.batch + 1}},
                       {lens.as<std::int32_t>().data(), {shape.batch}}},
                      0.0721687836F);
  }
};

void bench(Bench& b, const Shape& s, LatentFormat format) {
  Problem problem(b, s, format);
  if (!problem.call(b.ctx, 0)) {
    std::printf("not on this GPU, or not this shape\n");
    return;
  }
  const double work = static_cast<double>(s.batch * s.rows * s.heads * s.context);
  const int calls = work > 3e9 ? 4 : work > 1e8 ? 20 : 100;
  const double us = time_us(b, calls, [&](int i) { static_cast<void>(problem.call(b.ctx, i)); });
  const double bytes = static_cast<double>(s.batch * s.context * kDim * element_bytes(format));
  // A prompt sees half of its keys on average.
  const double seen = s.rows == s.context ? work / 2 : work;
  std::printf("%-5s %5lld %8lld %5lld %5lld %9.1f %7.0f %5.1f%% %8.1f",
              std::string(latent_format_name(format)).c_str(), static_cast<long long>(s.batch),
              static_cast<long long>(s.context), static_cast<long long>(s.heads),
              static_cast<long long>(s.rows), us, bytes / us * 1e-3, bytes / us * 1e-1 / kReadGbs,
              2 * (kDim + kLatent) * seen / us * 1e-6);
  if (s.peer_us > 0) {
    std::printf(" %9.1f %6.2f", s.peer_us, s.peer_us / us);
  }
  std::printf("\n");
}

int run(const std::vector<std::string>& args) {
  std::vector<LatentFormat> formats;
  std::vector<Shape> shapes;
  for (const std::string& arg : args) {
    long long batch = 0, context = 0, heads = 0, rows = 1;
    if (std::sscanf(arg.c_str(), "%lldx%lldx%lldx%lld", &batch, &context, &heads, &rows) >= 3) {
      shapes.push_back({batch, context, heads, rows});
    }
    for (const LatentFormat format :
         {LatentFormat::kBF16, LatentFormat::kFp8, LatentFormat::kF32}) {
      if (arg == latent_format_name(format)) {
        formats.push_back(format);
      }
    }
  }
  if (formats.empty()) {
    formats = {LatentFormat::kBF16};
  }
  if (shapes.empty()) {
    shapes.assign(std::begin(kShapes), std::end(kShapes));
  }
  Bench b;
  std::printf("%s, %d SMs\n", b.device.info().name.c_str(), b.device.info().num_sms);
  std::printf("%-5s %5s %8s %5s %5s %9s %7s %6s %8s %9s %6s\n", "rows", "batch", "context", "heads",
              "q", "us", "GB/s", "read", "TFLOP/s", "peer us", "ratio");
  for (const LatentFormat format : formats) {
    for (const Shape& s : shapes) {
      bench(b, s, format);
    }
  }
  return 0;
}

}  // namespace
}  // namespace tandem::cuda::bench

int main(int argc, char** argv) {
  using namespace tandem::cuda::bench;
  return run_bench("cuda_mla_bench", [&] { return run({argv + 1, argv + argc}); });
}
