// mla_bwd.cu — gradients of absorbed MLA on packed training sequences.   Contract: ops/mla.h
// Oracle: ops/ref/mla_ref.h
// Math      p = exp(scale q . row - lse), d_p = d_o . c, delta = d_o . o;
//           d_s = p (d_p - delta) scale;  d_q += d_s row;  d_row += d_s q, and + p d_o on its c
//           part
// Schedule  Two passes, so that every sum has one owner and one order. Queries: a block takes a row
//           and up to 8 heads (a warp each) and walks over the keys. Keys: a block takes 32 rows of
//           kv and walks over the (row, head) pairs that see them, 8 at a time (a warp each).
// Numerics  fp32; keys, and pairs, in rising order; no atomics.
// Launch    grids depend on shapes only; graph-safe.
#include <algorithm>
#include <cmath>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mla/mla.cuh"
#include "backends/cuda/mla/mla_tile.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"

namespace tandem::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kKeysPerWarp = kTileRows32 / kWarps;

struct Backward {
  Cube<float> d_q_latent, d_q_shared;
  Mat<float> d_kv;
  Cube<const float> d_o, q_latent, q_shared, o;
  Mat<const float> kv, lse;
  const std::int32_t* cu_seqlens;
  float* delta;  // [T, H]
  int num_seqs;
  int num_rows;
  int num_heads;
  int dim;
  int latent;
  float scale;
};

/// Shared memory of both passes, in floats.
struct BackwardShared {
  int q;     // [warps, padded_4(dim)]
  int d_o;   // [warps, padded_4(latent)]
  int p;     // [warps, 32]
  int d_s;   // [warps, 32]
  int tile;  // [32, tile_stride(dim)]
  int sums;  // [sum_rows, dim]: gradients of the block's queries, or keys
  int total;

  __host__ __device__ BackwardShared(int warps, int sum_rows, int dim, int latent)
      : q(0),
        d_o(warps * padded_4(dim)),
        p(d_o + warps * padded_4(latent)),
        d_s(p + warps * kWarp),
        tile(d_s + warps * kWarp),
        sums(tile + kTileRows32 * tile_stride(dim)),
        total(sums + sum_rows * dim) {}
};

struct Weights {
  float p;
  float d_s;
};

/// p and d_s of a query (q, d_o in shared memory) and this lane's row of the tile.
__device__ __forceinline__ Weights score_gradient(const Backward& x, const float* q,
                                                  const float* d_o, const float* row, float lse,
                                                  float delta, bool valid) {
  const float score = x.scale * dot_row(q, row, x.dim);
  const float d_p = dot_row(d_o, row, x.latent);
  const float p = valid ? expf(score - lse) : 0.0F;
  return {p, valid ? p * (d_p - delta) * x.scale : 0.0F};
}

__device__ __forceinline__ void load_query(float* to, const Backward& x, int t, int head) {
  load_vector(to, x.q_latent.row(t, head), x.latent);
  load_vector(to + x.latent, x.q_shared.row(t, head), x.dim - x.latent);
}

__global__ void __launch_bounds__(kThreads, 2) query_gradients(const Backward x) {
  begin_kernel();
  extern __shared__ float4 shared[];
  float* const base = reinterpret_cast<float*>(shared);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const BackwardShared at(warps, warps, x.dim, x.latent);
  const int groups = (x.num_heads + warps - 1) / warps;
  const int t = static_cast<int>(blockIdx.x) / groups;
  const int wanted = static_cast<int>(blockIdx.x) % groups * warps + warp;
  const int head = min(wanted, x.num_heads - 1);  // a warp too many repeats the last head
  float* const q = base + at.q + warp * padded_4(x.dim);
  float* const d_o = base + at.d_o + warp * padded_4(x.latent);
  float* const d_s = base + at.d_s + warp * kWarp;
  float* const sums = base + at.sums + warp * x.dim;
  float* const tile = base + at.tile;
  load_query(q, x, t, head);
  load_vector(d_o, x.d_o.row(t, head), x.latent);
  for (int d = lane; d < x.dim; d += kWarp) {
    sums[d] = 0.0F;
  }
  float delta = 0.0F;
  for (int d = lane; d < x.latent; d += kWarp) {
    delta = fmaf(d_o[d], x.o.row(t, head)[d], delta);
  }
  delta = warp_sum(delta);
  const float lse = x.lse.row(t)[head];
  const int begin = x.cu_seqlens[sequence_of(x.cu_seqlens, x.num_seqs, t)];
  for (int first = begin; first <= t; first += kTileRows32) {
    const int count = min(kTileRows32, t + 1 - first);
    __syncthreads();  // the previous tile has been read; q and d_o are there
    load_tile(tile, x.dim, count, [&](int j) { return x.kv.row(first + j); });
    __syncthreads();
    const float* row = tile + lane * tile_stride(x.dim);
    d_s[lane] = score_gradient(x, q, d_o, row, lse, delta, lane < count).d_s;
    __syncwarp();
    for (int d = lane; d < x.dim; d += kWarp) {
      sums[d] = weighted_column(sums[d], d_s, tile, x.dim, d);
    }
    __syncwarp();  // d_s has been read
  }
  if (wanted == head) {
    for (int d = lane; d < x.dim; d += kWarp) {
      float* const to =
          d < x.latent ? x.d_q_latent.row(t, head) + d : x.d_q_shared.row(t, head) + (d - x.latent);
      *to = sums[d];
    }
    if (lane == 0) {
      x.delta[static_cast<std::int64_t>(t) * x.num_heads + head] = delta;
    }
  }
}

/// Adds 8 pairs to the gradients of the warp's keys, on the channels lane, lane + 32, ...
__device__ __forceinline__ void add_pairs(const Backward& x, const float* base,
                                          const BackwardShared& at, float* sums) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int first = warp * kKeysPerWarp;
  static_assert(kKeysPerWarp == 4);  // one float4 of weights
  for (int d = static_cast<int>(threadIdx.x) % kWarp; d < x.dim; d += kWarp) {
    float* const mine = sums + first * x.dim + d;
    float sum[kKeysPerWarp];
#pragma unroll
    for (int j = 0; j < kKeysPerWarp; ++j) {
      sum[j] = mine[j * x.dim];
    }
    for (int pair = 0; pair < kWarps; ++pair) {
      const float q = base[at.q + pair * padded_4(x.dim) + d];
      const float d_o = d < x.latent ? base[at.d_o + pair * padded_4(x.latent) + d] : 0.0F;
      const auto d_s = *reinterpret_cast<const float4*>(base + at.d_s + pair * kWarp + first);
      const auto p = *reinterpret_cast<const float4*>(base + at.p + pair * kWarp + first);
      sum[0] = fmaf(p.x, d_o, fmaf(d_s.x, q, sum[0]));
      sum[1] = fmaf(p.y, d_o, fmaf(d_s.y, q, sum[1]));
      sum[2] = fmaf(p.z, d_o, fmaf(d_s.z, q, sum[2]));
      sum[3] = fmaf(p.w, d_o, fmaf(d_s.w, q, sum[3]));
    }
#pragma unroll
    for (int j = 0; j < kKeysPerWarp; ++j) {
      mine[j * x.dim] = sum[j];
    }
  }
}

__global__ void __launch_bounds__(kThreads) key_gradients(const Backward x) {
  begin_kernel();
  extern __shared__ float4 shared[];
  float* const base = reinterpret_cast<float*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const BackwardShared at(kWarps, kTileRows32, x.dim, x.latent);
  const int first = static_cast<int>(blockIdx.x) * kTileRows32;
  const int count = min(kTileRows32, x.num_rows - first);
  float* const q = base + at.q + warp * padded_4(x.dim);
  float* const d_o = base + at.d_o + warp * padded_4(x.latent);
  float* const tile = base + at.tile;
  float* const sums = base + at.sums;
  load_tile(tile, x.dim, count, [&](int j) { return x.kv.row(first + j); });
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows32 * x.dim; i += kThreads) {
    sums[i] = 0.0F;
  }
  // This lane's key is seen by rows key .. key_end - 1, and some key of the block by all rows up to
  // the end of its last key's sequence.
  const int key = first + min(lane, count - 1);
  const int key_end = x.cu_seqlens[sequence_of(x.cu_seqlens, x.num_seqs, key) + 1];
  const int end = __shfl_sync(kFullWarp, key_end, count - 1);
  const std::int64_t last_pair = static_cast<std::int64_t>(end) * x.num_heads;
  for (std::int64_t pair = static_cast<std::int64_t>(first) * x.num_heads; pair < last_pair;
       pair += kWarps) {
    const std::int64_t mine = pair + warp;
    const bool has_pair = mine < last_pair;
    const int t = has_pair ? static_cast<int>(mine / x.num_heads) : first;
    const int head = has_pair ? static_cast<int>(mine % x.num_heads) : 0;
    load_query(q, x, t, head);
    load_vector(d_o, x.d_o.row(t, head), x.latent);
    __syncthreads();  // the tile and the zeros, the first time; this warp's q and d_o
    const bool valid = has_pair && lane < count && t >= key && t < key_end;
    const float delta = x.delta[static_cast<std::int64_t>(t) * x.num_heads + head];
    const Weights weights = score_gradient(x, q, d_o, tile + lane * tile_stride(x.dim),
                                           x.lse.row(t)[head], delta, valid);
    base[at.p + warp * kWarp + lane] = weights.p;
    base[at.d_s + warp * kWarp + lane] = weights.d_s;
    __syncthreads();  // all pairs are weighted
    add_pairs(x, base, at, sums);
    __syncthreads();  // q, d_o and the weights have been read
  }
  for (int j = warp; j < count; j += kWarps) {
    for (int d = lane; d < x.dim; d += kWarp) {
      x.d_kv.row(first + j)[d] = sums[j * x.dim + d];
    }
  }
}

std::int64_t shared_bytes(CudaDevice& device, const BackwardShared& shared) {
  const std::int64_t bytes = static_cast<std::int64_t>(shared.total) * 4;
  TDM_CHECK(bytes <= device.info().smem_per_block, bytes, device.info().smem_per_block);
  return bytes;
}

}  // namespace

void mla_absorbed_bwd(const ExecCtx& ctx, const MlaQueryGrad& d_q, F32Mat d_kv,
                      ConstF32Cube d_o_lat, const MlaQuery& q, ConstF32Mat kv, ConstF32Cube o_lat,
                      ConstF32Mat lse, ConstI32Vec cu_seqlens, float scale) {
  if (o_lat.empty()) {
    return;
  }
  CudaDevice& device = device_of(ctx);
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t rows = o_lat.size(0);
  const std::int64_t heads = o_lat.size(1);
  const Backward x{.d_q_latent = device_cube(d_q.latent),
                   .d_q_shared = device_cube(d_q.shared),
                   .d_kv = device_mat(d_kv),
                   .d_o = device_cube(d_o_lat),
                   .q_latent = device_cube(q.latent),
                   .q_shared = device_cube(q.shared),
                   .o = device_cube(o_lat),
                   .kv = device_mat(kv),
                   .lse = device_mat(lse),
                   .cu_seqlens = cu_seqlens.data(),
                   .delta = ctx.workspace->take<float>(rows * heads).data(),
                   .num_seqs = static_cast<int>(cu_seqlens.size(0) - 1),
                   .num_rows = static_cast<int>(rows),
                   .num_heads = static_cast<int>(heads),
                   .dim = static_cast<int>(kv.size(1)),
                   .latent = static_cast<int>(o_lat.size(2)),
                   .scale = scale};
  const int warps = std::min(x.num_heads, kWarps);
  const std::int64_t query_blocks = rows * ((x.num_heads + warps - 1) / warps);
  TDM_CHECK(query_blocks <= INT32_MAX, query_blocks);
  const std::int64_t query_bytes =
      shared_bytes(device, BackwardShared(warps, warps, x.dim, x.latent));
  launch(ctx, "mla_absorbed_bwd (queries)", query_gradients,
         {static_cast<unsigned>(query_blocks), static_cast<unsigned>(warps * kWarp), query_bytes},
         x);

  const std::int64_t key_bytes =
      shared_bytes(device, BackwardShared(kWarps, kTileRows32, x.dim, x.latent));
  const int key_blocks = (x.num_rows + kTileRows32 - 1) / kTileRows32;
  launch(ctx, "mla_absorbed_bwd (keys)", key_gradients,
         {static_cast<unsigned>(key_blocks), kThreads, key_bytes}, x);
}

}  // namespace tandem::cuda
