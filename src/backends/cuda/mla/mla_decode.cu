// mla_decode.cu — absorbed MLA on Hopper: choice, workspace and launches.   Contract: ops/mla.h
// The kernel: mla_decode_kernel.cuh. Rows are taken in groups whose partial sums fit a budget.
#include <algorithm>
#include <cstdint>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mla/mla_decode.cuh"
#include "backends/cuda/mla/mla_decode_host.h"
#include "backends/cuda/mla/mla_decode_launch.h"
#include "backends/cuda/runtime/cuda_device.h"
#include "backends/cuda/runtime/tensor_map.h"
#include "core/check.h"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kPartialBytes = std::int64_t{512} << 20;
constexpr int kMostBoxRows = 32;  // half a tile: what one CTA of a pair copies

template <typename T, int Rank>
bool rows_aligned(const TensorView<T, Rank>& x) {
  bool aligned = reinterpret_cast<std::uintptr_t>(x.data()) % 16 == 0;
  for (int axis = 0; axis + 1 < Rank; ++axis) {
    aligned = aligned && x.stride(axis) % 4 == 0;
  }
  return aligned;
}

/// Keys that lie side by side wherever a multiple of as many begins, and make whole groups of 8
/// rows of a tile; 0: fewer than 8 do, or the rows are not copied as they are.
int box_rows_of(const MlaCacheView& cache) {
  const std::int64_t run = cache.is_batch() ? kMostBoxRows : cache.page_size;
  int rows = kMostBoxRows;
  while (run % rows != 0) {
    rows /= 2;
  }
  const bool as_they_are =
      cache.rows.format == LatentFormat::kBF16 && cache.rows.num_rows <= INT32_MAX;
  return rows >= 8 && as_they_are ? rows : 0;
}

/// One item reads a key, and the cache could not hold all of them anyway.
bool is_read_once(const MlaCacheView& cache, const MlaBatch& batch, const DecodeConfig& config,
                  std::int64_t rows, const DeviceInfo& info) {
  const std::int64_t sequences = batch.cu_seqlens.size(0) - 1;
  const std::int64_t keys = sequences * cache.page_table.size(1) * cache.page_size;
  return !cache.is_batch() && rows <= sequences * config.group_rows &&
         keys * cache.rows.row_bytes > info.l2_bytes;
}

DecodeKernel kernel_of(LatentFormat format, const DecodeConfig& config) {
  switch (format) {
    case LatentFormat::kBF16:
      return decode_kernel_bf16(config);
    case LatentFormat::kF32:
      return decode_kernel_f32(config);
    case LatentFormat::kFp8:
      return decode_kernel_fp8(config);
  }
  return nullptr;
}

DecodeArgs arguments(const MlaQuery& q, const MlaCacheView& cache, const MlaBatch& batch) {
  DecodeArgs x{};
  x.box_rows = box_rows_of(cache);
  if (x.box_rows > 0) {
    x.boxes = make_tensor_map({.data = cache.rows.data,
                               .rows = cache.rows.num_rows,
                               .columns = kDecodeDim,
                               .row_bytes = cache.rows.row_bytes,
                               .box_rows = x.box_rows});
  }
  x.keys = {.rows = cache.rows.data,
            .row_bytes = cache.rows.row_bytes,
            .format = cache.rows.format,
            .page_table = {cache.is_batch() ? nullptr : cache.page_table.data(),
                           cache.page_table.stride(0)},
            .page_size = static_cast<int>(cache.page_size),
            .cu_seqlens = batch.cu_seqlens.data(),
            .kv_lens = batch.kv_lens.data(),
            .num_seqs = static_cast<int>(batch.cu_seqlens.size(0)) - 1};
  x.q = device_cube(q.latent);
  x.q_shared = device_cube(q.shared);
  x.aligned_q = rows_aligned(q.latent) && rows_aligned(q.shared);
  x.num_heads = static_cast<int>(q.latent.size(1));
  x.max_splits =
      max_splits(x.num_heads,
                 cache.is_batch() ? q.latent.size(0) : cache.page_table.size(1) * cache.page_size);
  return x;
}

/// Launches over rows, so many at once that their partials fit the budget.
void attend(const ExecCtx& ctx, DecodeArgs& x, const DecodeConfig& config, LatentFormat format,
            std::int64_t rows) {
  const DecodeKernel kernel = kernel_of(format, config);
  const int cluster = format == LatentFormat::kBF16 ? config.ctas : 1;
  const int slots = device_of(ctx).info().num_sms / config.ctas;
  const std::int64_t row_partials = std::int64_t{x.max_splits} * x.num_heads;
  const std::int64_t affordable = kPartialBytes / (row_partials * (kDecodeLatent + 2) * 4);
  const std::int64_t group = std::min(std::clamp<std::int64_t>(affordable, 1, kDecodeRows), rows);
  const ArenaScope scope(*ctx.workspace);
  x.partial_o = ctx.workspace->take<float>(group * row_partials * kDecodeLatent).data();
  x.partial_sum = ctx.workspace->take<float2>(group * row_partials).data();
  for (std::int64_t first = 0; first < rows; first += group) {
    x.first_row = static_cast<int>(first);
    x.num_rows = static_cast<int>(std::min(group, rows - first));
    const int items = x.num_rows * x.max_splits;
    const unsigned ctas = static_cast<unsigned>(std::min(items, slots) * config.ctas);
    launch(ctx, "mla_absorbed", kernel, {ctas, kDecodeThreads, config.smem_bytes, cluster}, x);
    if (x.max_splits > 1) {
      mla_decode_merge(ctx, x);
    }
  }
}

}  // namespace

bool mla_decode(const ExecCtx& ctx, F32Cube o_lat, F32Mat lse, const MlaQuery& q,
                const MlaCacheView& cache, const MlaBatch& batch, float scale) {
  constexpr float kLog2e = 1.44269504F;
  const CudaDevice& device = device_of(ctx);
  const std::int64_t rows = q.latent.size(0);
  const bool fits =
      device.info().major == 9 && device.info().minor == 0 && !device.options().exact_linear &&
      q.latent.size(2) == kDecodeLatent && q.shared.size(2) == kDecodeDim - kDecodeLatent &&
      reinterpret_cast<std::uintptr_t>(cache.rows.data) % 16 == 0 && cache.rows.row_bytes % 16 == 0;
  if (!fits || rows == 0) {
    return false;
  }
  const auto config = choose_decode({.heads = static_cast<int>(q.latent.size(1)),
                                     .rows = rows,
                                     .sequences = batch.cu_seqlens.size(0) - 1},
                                    device.info());
  if (!config) {
    return false;
  }
  DecodeArgs x = arguments(q, cache, batch);
  x.o = device_cube(o_lat);
  x.lse = {lse.empty() ? nullptr : lse.data(), lse.stride(0)};
  x.scale_log2 = scale * kLog2e;
  x.group_rows = config->group_rows;
  x.stages = config->stages;
  x.read_once = is_read_once(cache, batch, *config, rows, device.info());
  attend(ctx, x, *config, cache.rows.format, rows);
  return true;
}

}  // namespace tandem::cuda
