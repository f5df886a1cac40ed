// mla_absorbed.cu — absorbed MLA over a paged cache.   Contract: ops/mla.h
// Oracle: ops/ref/mla_ref.h
// Schedule  K3's shape on Hopper: mla_decode.cu. Else the law of chunks of mla.cuh: first the
//           chunks, by the kernel that choose_kernel() names, then one merge where a row can have
//           several. Rows are taken in groups whose partials fit a budget.
// fp32      A block takes a row, up to 8 heads (a warp each) and a chunk; key tiles of 32 lie in
//           shared memory, one key a lane for the scores, one channel a lane for the weighted sums.
// Numerics  fp32 with natural exponentials; keys in order of position.
// Launch    grids depend on shapes only; chunks beyond a row's keys end at once; graph-safe.
#include <algorithm>
#include <cmath>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mla/latent_row.cuh"
#include "backends/cuda/mla/mla.cuh"
#include "backends/cuda/mla/mla_decode_host.h"
#include "backends/cuda/mla/mla_tile.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"

namespace tandem::cuda {
namespace {

constexpr int kMaxWarps = 8;
constexpr int kMergeThreads = 128;
constexpr int kMergeLoads = 32;  // of a thread in flight: one row alone has few threads
static_assert(kMaxChunks <= kMergeThreads);
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

__device__ __forceinline__ void load_query(float* to, const Attention& x, int t, int head) {
  load_vector(to, x.q_latent.row(t, head), x.latent);
  load_vector(to + x.latent, x.q_shared.row(t, head), x.dim - x.latent);
}

/// A warp's sums: the result of a row of one chunk (or none), or partials.
__device__ __forceinline__ void store_chunk(const Attention& x, int row, int chunk, int head,
                                            bool whole, const float* o, const Softmax& softmax) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int t = x.first_row + row;
  const std::int64_t index = x.partial(row, chunk, head);
  float* const to = whole ? x.o.row(t, head) : x.partial_o + index * x.latent;
  const bool empty = softmax.sum == 0.0F;
  for (int d = lane; d < x.latent; d += kWarp) {
    to[d] = whole ? (empty ? 0.0F : o[d] / softmax.sum) : o[d];
  }
  if (lane != 0) {
    return;
  }
  if (!whole) {
    x.partial_sum[index] = {softmax.top, softmax.sum};
  } else if (x.lse.data != nullptr) {
    x.lse.row(t)[head] = empty ? -INFINITY : softmax.top + logf(softmax.sum);
  }
}

template <LatentFormat kFormat>
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
  const RowKeys keys = x.keys.of_row(t);
  const int begin = chunk * chunk_keys(keys.visible);
  const int end = min(keys.visible, begin + chunk_keys(keys.visible));
  if (begin >= end && chunk > 0) {  // chunk 0 of a row without keys writes its zeros
    return;
  }
  float* const q = base + at.q + warp * padded_4(x.dim);
  float* const weights = base + at.weights + warp * kWarp;
  float* const o = base + at.o + warp * x.latent;
  float* const tile = base + at.tile;
  const bool has_head = head < x.num_heads;
  if (has_head) {
    load_query(q, x, t, head);
    for (int d = lane; d < x.latent; d += kWarp) {
      o[d] = 0.0F;
    }
  }
  Softmax softmax;
  for (int first = begin; first < end; first += kTileRows32) {
    const int count = min(kTileRows32, end - first);
    __syncthreads();  // the previous tile has been read; q is there
    load_tile(tile, x.dim, count,
              [&](int j) { return LatentRow<kFormat>{x.keys.key(keys.seq, first + j)}; });
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
    store_chunk(x, row, chunk, head, keys.chunks() <= 1, o, softmax);
  }
}

/// Parts of one channel: chunks [first, first + kMergeLoads) in flight at once.
struct MergeLoads {
  float part[kMergeLoads];

  __device__ __forceinline__ void load(const float* from, std::int64_t stride, int first,
                                       int chunks) {
#pragma unroll
    for (int i = 0; i < kMergeLoads; ++i) {
      part[i] = first + i < chunks ? from[(first + i) * stride] : 0.0F;
    }
  }
  __device__ __forceinline__ float add(float o, const float* weights, int first, int chunks) const {
#pragma unroll
    for (int i = 0; i < kMergeLoads; ++i) {
      o = first + i < chunks ? fmaf(weights[first + i], part[i], o) : o;
    }
    return o;
  }
};

/// Merges the chunks of one row and head, on kMergeThreads channels of the output. Partials that
/// were never written are not read.
__global__ void __launch_bounds__(kMergeThreads, 8) merge_chunks(const Attention x) {
  begin_kernel();
  __shared__ float2 sums[kMaxChunks];
  __shared__ float weights[kMaxChunks];
  const int row = static_cast<int>(blockIdx.x) / x.num_heads;
  const int head = static_cast<int>(blockIdx.x) % x.num_heads;
  const int channel = static_cast<int>(blockIdx.y) * kMergeThreads + static_cast<int>(threadIdx.x);
  const int t = x.first_row + row;
  const int chunks = x.keys.of_row(t).chunks();
  if (chunks <= 1) {
    return;  // finished
  }
  const int mine = static_cast<int>(threadIdx.x);
  const bool has_channel = channel < x.latent;
  const float* const from =
      x.partial_o + x.partial(row, 0, head) * x.latent + (has_channel ? channel : 0);
  const std::int64_t stride = static_cast<std::int64_t>(x.num_heads) * x.latent;
  MergeLoads loads;
  loads.load(from, stride, 0, chunks);
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
  float o = loads.add(0.0F, weights, 0, chunks);
  for (int first = kMergeLoads; first < chunks; first += kMergeLoads) {
    loads.load(from, stride, first, chunks);
    o = loads.add(o, weights, first, chunks);
  }
  if (has_channel) {
    x.o.row(t, head)[channel] = o / sum;
  }
  if (x.lse.data != nullptr && channel == 0) {
    x.lse.row(t)[head] = top + logf(sum);
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
  const Launch how{grid, static_cast<unsigned>(warps * kWarp), bytes};
  switch (x.keys.format) {
    case LatentFormat::kF32:
      return launch(ctx, "mla_absorbed", attend_chunk<LatentFormat::kF32>, how, x);
    case LatentFormat::kBF16:
      return launch(ctx, "mla_absorbed", attend_chunk<LatentFormat::kBF16>, how, x);
    case LatentFormat::kFp8:
      return launch(ctx, "mla_absorbed", attend_chunk<LatentFormat::kFp8>, how, x);
  }
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

/// How the chunks of a call are attended: run() fills the partials of every chunk of rows that have
/// several, and writes the results of the others.
struct ChunkKernel {
  int most_rows;  // of one launch
  void (*run)(const ExecCtx&, const Attention&);
};

/// The one place where a kernel is chosen, after mla_decode(), which takes what it can by a law of
/// its own. The choice decides the bits of a row, so it may depend
/// on the row format, the numbers of heads and channels and the device, not on the batch: decode
/// and prefill of a sequence must agree.
ChunkKernel choose_kernel(const ExecCtx& ctx, const Attention& x) {
  if (const int rows = mla_tensor_rows(ctx, x); rows > 0) {
    return {rows, mla_tensor_chunks};
  }
  return {kMaxRows, fp32_chunks};
}

Attention attention_of(F32Cube o_lat, F32Mat lse, const MlaQuery& q, const MlaCacheView& cache,
                       const MlaBatch& batch, float scale) {
  const ConstLatentRows& rows = cache.rows;
  const std::int64_t most_keys =
      cache.is_batch() ? rows.num_rows : cache.page_table.size(1) * cache.page_size;
  const bool keys_aligned =
      reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.row_bytes % 16 == 0;
  return {.o = device_cube(o_lat),
          .lse = {lse.empty() ? nullptr : lse.data(), lse.stride(0)},
          .q_latent = device_cube(q.latent),
          .q_shared = device_cube(q.shared),
          .keys = {.rows = rows.data,
                   .row_bytes = rows.row_bytes,
                   .format = rows.format,
                   .page_table = {cache.is_batch() ? nullptr : cache.page_table.data(),
                                  cache.page_table.stride(0)},
                   .page_size = static_cast<int>(cache.page_size),
                   .cu_seqlens = batch.cu_seqlens.data(),
                   .kv_lens = batch.kv_lens.data(),
                   .num_seqs = static_cast<int>(batch.cu_seqlens.size(0)) - 1},
          .scale = scale,
          .num_heads = static_cast<int>(o_lat.size(1)),
          .dim = static_cast<int>(rows.width),
          .latent = static_cast<int>(o_lat.size(2)),
          .first_row = 0,
          .num_rows = 0,
          .max_chunks = std::max(max_chunks(most_keys), 1),
          .queries_aligned = rows_aligned(q.latent) && rows_aligned(q.shared),
          .keys_aligned = keys_aligned,
          .partial_o = nullptr,
          .partial_sum = nullptr};
}

}  // namespace

void mla_absorbed(const ExecCtx& ctx, F32Cube o_lat, F32Mat lse, const MlaQuery& q,
                  const MlaCacheView& cache, const MlaBatch& batch, float scale) {
  if (o_lat.empty()) {
    return;
  }
  if (mla_decode(ctx, o_lat, lse, q, cache, batch, scale)) {
    return;
  }
  const std::int64_t rows = o_lat.size(0);
  Attention x = attention_of(o_lat, lse, q, cache, batch, scale);
  const ChunkKernel kernel = choose_kernel(ctx, x);
  const bool merges = x.max_chunks > 1;  // else no partials are written
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t row_partials = static_cast<std::int64_t>(x.max_chunks) * x.num_heads;
  const std::int64_t affordable =
      merges ? kPartialBytes / (row_partials * (x.latent + 2) * 4) : rows;
  const std::int64_t group =
      std::min(std::clamp<std::int64_t>(affordable, 1, kernel.most_rows), rows);
  if (merges) {
    x.partial_o = ctx.workspace->take<float>(group * row_partials * x.latent).data();
    x.partial_sum = ctx.workspace->take<float2>(group * row_partials).data();
  }
  for (std::int64_t first = 0; first < rows; first += group) {
    x.first_row = static_cast<int>(first);
    x.num_rows = static_cast<int>(std::min(group, rows - first));
    kernel.run(ctx, x);
    if (merges) {
      merge(ctx, x);
    }
  }
}

}  // namespace tandem::cuda
