// mla_absorbed.cu — absorbed MLA over a paged cache.   Contract: ops/mla.h
// Oracle: ops/ref/mla_ref.h
// Schedule  The law of chunks of mla.cuh: first the chunks, on the tensor cores (mla_tensor.cu) or
//           in fp32 (here), then one merge. Rows are taken in groups whose partials fit a budget.
// fp32      A block takes a row, up to 8 heads (a warp each) and a chunk; key tiles of 32 lie in
//           shared memory, one key a lane for the scores, one channel a lane for the weighted sums.
// Numerics  fp32 with natural exponentials; keys in order of position.
// Launch    grids depend on shapes only; chunks beyond a row's keys end at once; graph-safe.
#include <algorithm>
#include <cmath>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mla.cuh"
#include "backends/cuda/mla_tile.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"

namespace tandem::cuda {
namespace {

constexpr int kMaxWarps = 8;
constexpr int kMergeThreads = 128;
constexpr int kMergeLoads = 32;  // of a thread in flight: one row alone has few threads
constexpr std::int64_t kPartialBytes = std::int64_t{512} << 20;
constexpr int kMaxRows = 32768;  // of one launch of the fp32 kernel: rows are on the grid's z axis

/// Shared memory of attend_chunk, in floats.
struct ChunkShared {
  int q;        // [warps, padded_4(dim)]
  int weights;  // [warps, 32]
  int o;        // [warps, latent]
  int tile;     // [32, tile_stride(dim)]
  int total;

  __host__ __device__ ChunkShared(int warps, int dim, int latent)
      : q(0),
        weights(warps * padded_4(dim)),
        o(weights + warps * kWarp),
        tile(o + warps * latent),
        total(tile + kTileRows32 * tile_stride(dim)) {}
};

__global__ void __launch_bounds__(kMaxWarps* kWarp) attend_chunk(const Attention x) {
  begin_kernel();
  extern __shared__ float4 shared[];
  float* const base = reinterpret_cast<float*>(shared);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const ChunkShared at(warps, x.dim, x.latent);
  const int chunk = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y) * warps + warp;
  const int row = static_cast<int>(blockIdx.z);
  const int t = x.first_row + row;
  const int seq = sequence_of(x.keys.cu_seqlens, x.keys.num_seqs, t);
  const int visible = x.keys.visible(seq, t);
  const int begin = chunk * chunk_keys(visible);
  const int end = min(visible, begin + chunk_keys(visible));
  if (begin >= end) {
    return;
  }
  float* const q = base + at.q + warp * padded_4(x.dim);
  float* const weights = base + at.weights + warp * kWarp;
  float* const o = base + at.o + warp * x.latent;
  float* const tile = base + at.tile;
  const bool has_head = head < x.num_heads;
  if (has_head) {
    load_vector(q, x.q.row(t, head), x.dim);
    for (int d = lane; d < x.latent; d += kWarp) {
      o[d] = 0.0F;
    }
  }
  Softmax softmax;
  for (int first = begin; first < end; first += kTileRows32) {
    const int count = min(kTileRows32, end - first);
    __syncthreads();  // the previous tile has been read; q is there
    load_tile(tile, x.dim, count, [&](int j) { return x.keys.key(seq, first + j); });
    __syncthreads();
    if (has_head) {
      const float dot = dot_row(q, tile + lane * tile_stride(x.dim), x.dim);
      const float2 step = softmax.add(x.scale * dot, lane < count);
      weights[lane] = step.x;
      __syncwarp();
      for (int d = lane; d < x.latent; d += kWarp) {
        o[d] = weighted_column(o[d] * step.y, weights, tile, x.dim, d);
      }
      __syncwarp();  // the weights have been read
    }
  }
  if (has_head) {
    const std::int64_t index = x.partial(row, chunk, head);
    for (int d = lane; d < x.latent; d += kWarp) {
      x.partial_o[index * x.latent + d] = o[d];
    }
    if (lane == 0) {
      x.partial_sum[index] = {softmax.top, softmax.sum};
    }
  }
}

/// Merges the chunks of one row and head, on kMergeThreads channels of the output.
__global__ void __launch_bounds__(kMergeThreads, 8) merge_chunks(const Attention x) {
  begin_kernel();
  __shared__ float2 sums[kMaxChunks];
  __shared__ float weights[kMaxChunks];
  const int row = static_cast<int>(blockIdx.x) / x.num_heads;
  const int head = static_cast<int>(blockIdx.x) % x.num_heads;
  const int channel = static_cast<int>(blockIdx.y) * kMergeThreads + static_cast<int>(threadIdx.x);
  const int t = x.first_row + row;
  const int seq = sequence_of(x.keys.cu_seqlens, x.keys.num_seqs, t);
  const int visible = x.keys.visible(seq, t);
  const int chunks = visible > 0 ? num_chunks(visible) : 0;
  const int mine = static_cast<int>(threadIdx.x);
  if (mine < chunks) {
    sums[mine] = x.partial_sum[x.partial(row, mine, head)];
  }
  __syncthreads();
  float top = -INFINITY;
  for (int i = 0; i < chunks; ++i) {
    top = fmaxf(top, sums[i].x);
  }
  if (mine < chunks) {
    weights[mine] = expf(sums[mine].x - top);
  }
  __syncthreads();
  float sum = 0.0F;
  for (int i = 0; i < chunks; ++i) {
    sum = fmaf(weights[i], sums[i].y, sum);
  }
  if (channel < x.latent) {
    const float* from = x.partial_o + x.partial(row, 0, head) * x.latent + channel;
    const std::int64_t stride = static_cast<std::int64_t>(x.num_heads) * x.latent;
    float o = 0.0F;
    for (int first = 0; first < chunks; first += kMergeLoads) {
      float part[kMergeLoads];
#pragma unroll
      for (int i = 0; i < kMergeLoads; ++i) {
        part[i] = first + i < chunks ? from[(first + i) * stride] : 0.0F;
      }
#pragma unroll
      for (int i = 0; i < kMergeLoads; ++i) {
        o = first + i < chunks ? fmaf(weights[first + i], part[i], o) : o;
      }
    }
    x.o.row(t, head)[channel] = chunks > 0 ? o / sum : 0.0F;
  }
  if (x.lse.data != nullptr && channel == 0) {
    x.lse.row(t)[head] = chunks > 0 ? top + logf(sum) : -INFINITY;
  }
}

void fp32_chunks(const ExecCtx& ctx, const Attention& x) {
  CudaDevice& device = device_of(ctx);
  const int warps = std::min(x.num_heads, kMaxWarps);
  const ChunkShared shared(warps, x.dim, x.latent);
  const auto bytes = static_cast<std::int64_t>(shared.total) * 4;
  TDM_CHECK(bytes <= device.info().smem_per_block, bytes, device.info().smem_per_block);
  const dim3 grid(static_cast<unsigned>(x.max_chunks),
                  static_cast<unsigned>((x.num_heads + warps - 1) / warps),
                  static_cast<unsigned>(x.num_rows));
  launch(ctx, "mla_absorbed", attend_chunk, {grid, static_cast<unsigned>(warps * kWarp), bytes}, x);
}

void merge(const ExecCtx& ctx, const Attention& x) {
  const dim3 grid(static_cast<unsigned>(x.num_rows * x.num_heads),
                  static_cast<unsigned>((x.latent + kMergeThreads - 1) / kMergeThreads));
  launch(ctx, "mla_absorbed (merge)", merge_chunks, {grid, kMergeThreads}, x);
}

template <typename T, int Rank>
bool rows_aligned(const TensorView<T, Rank>& x) {
  bool aligned = reinterpret_cast<std::uintptr_t>(x.data()) % 16 == 0;
  for (int axis = 0; axis + 1 < Rank; ++axis) {
    aligned = aligned && x.stride(axis) % 4 == 0;
  }
  return aligned;
}

}  // namespace

void mla_absorbed(const ExecCtx& ctx, F32Cube o_lat, F32Mat lse, ConstF32Cube q,
                  const MlaCacheView& cache, const MlaBatch& batch, float scale) {
  const std::int64_t rows = q.size(0);
  if (o_lat.empty()) {
    return;
  }
  const std::int64_t most_keys =
      cache.is_batch() ? rows : cache.page_table.size(1) * cache.page_size;
  const ArenaScope scope(*ctx.workspace);
  Attention x{.o = device_cube(o_lat),
              .lse = {lse.empty() ? nullptr : lse.data(), lse.stride(0)},
              .q = device_cube(q),
              .keys = {.rows = {cache.rows.data(), cache.rows.stride(0)},
                       .page_table = {cache.is_batch() ? nullptr : cache.page_table.data(),
                                      cache.page_table.stride(0)},
                       .page_size = static_cast<int>(cache.page_size),
                       .cu_seqlens = batch.cu_seqlens.data(),
                       .kv_lens = batch.kv_lens.data(),
                       .num_seqs = static_cast<int>(batch.cu_seqlens.size(0)) - 1},
              .scale = scale,
              .num_heads = static_cast<int>(q.size(1)),
              .dim = static_cast<int>(q.size(2)),
              .latent = static_cast<int>(o_lat.size(2)),
              .first_row = 0,
              .num_rows = 0,
              .max_chunks = std::max(max_chunks(most_keys), 1),
              .aligned = rows_aligned(q) && rows_aligned(cache.rows),
              .partial_o = nullptr,
              .partial_sum = nullptr};
  const int tensor_rows = mla_tensor_rows(ctx, x);
  const std::int64_t row_partials = static_cast<std::int64_t>(x.max_chunks) * x.num_heads;
  const std::int64_t affordable = kPartialBytes / (row_partials * (x.latent + 2) * 4);
  const std::int64_t group = std::min(
      std::clamp<std::int64_t>(affordable, 1, tensor_rows > 0 ? tensor_rows : kMaxRows), rows);
  x.partial_o = ctx.workspace->take<float>(group * row_partials * x.latent).data();
  x.partial_sum = ctx.workspace->take<float2>(group * row_partials).data();
  for (std::int64_t first = 0; first < rows; first += group) {
    x.first_row = static_cast<int>(first);
    x.num_rows = static_cast<int>(std::min(group, rows - first));
    if (tensor_rows > 0) {
      mla_tensor_chunks(ctx, x);
    } else {
      fp32_chunks(ctx, x);
    }
    merge(ctx, x);
  }
}

}  // namespace tandem::cuda
