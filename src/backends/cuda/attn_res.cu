// attn_res.cu — Attention Residuals, forward.   Contract: ops/attn_res.h
// Oracle: ops/ref/attn_res_ref.h
// Traffic   each source once: up to 9 sources (of K3) of up to 8,192 columns stay in registers from
//           their sums to the mix; what is beyond is read again for the mix and for each pass of
//           the norm.
// Numerics  fp32; a sum over columns: a thread's quads in order, lanes, warps, then blocks of the
//           cluster; the mix is one fma chain over the sources in order. The norm's sum likewise.
// Launch    a cluster of up to 8 blocks a row: 9 rows of 7,168 are 258 KB, more than one SM can
// hold or
//           read in time (decode-kernels.md 10.2). Graph-safe.
#include "backends/cuda/attn_res.cuh"
#include "backends/cuda/attn_res_bwd.h"
#include "backends/cuda/families.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/map_rows.cuh"
#include "backends/cuda/ptx/cluster.cuh"

namespace tandem::cuda {
namespace {

constexpr int kMostBlocks = 8;  // of a cluster, everywhere
constexpr int kHeld = 9;
constexpr int kMostThreads = 512;
constexpr int kThreadsPerSm = 768;  // enough loads under way while other clusters wait at barriers

struct AggregateArgs {
  Mat<float> out;     // null: not wanted
  Mat<float> normed;  // null: not wanted
  const float* norm_w;
  float norm_eps;
  Sources sources;
  const float* w;
  const float* u;
  std::int64_t dim;
  float eps;
  int cluster;                // blocks of a row
  std::int64_t cluster_cols;  // a quad a thread
};

/// x.x and x.c of a source's row; c = w u.
struct RowSums {
  float squares;
  float dot;
};

template <bool kAligned>
__device__ __forceinline__ Quad load_query(const AggregateArgs& args, std::int64_t at) {
  const Quad w = load_quad<kAligned>(args.w, at, args.dim);
  const Quad u = load_quad<kAligned>(args.u, at, args.dim);
  Quad c;
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    c.v[k] = w.v[k] * u.v[k];
  }
  return c;
}

__device__ __forceinline__ RowSums add_sums(RowSums sums, const Quad& x, const Quad& c) {
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    sums.squares = fmaf(x.v[k], x.v[k], sums.squares);
    sums.dot = fmaf(x.v[k], c.v[k], sums.dot);
  }
  return sums;
}

/// This thread's columns from `at` on, a cluster's width apart.
template <bool kAligned>
__device__ RowSums column_sums(const AggregateArgs& args, const float* x, std::int64_t at) {
  RowSums sums{0.0F, 0.0F};
  for (; at < args.dim; at += args.cluster_cols) {
    sums = add_sums(sums, load_quad<kAligned>(x, at, args.dim), load_query<kAligned>(args, at));
  }
  return sums;
}

/// Sums by warp, then by block of the cluster: squares of source i at [i], its dot at
/// [kMaxSources + i].
template <int kThreads>
struct SharedSums {
  static constexpr int kWarps = kThreads / kWarp;
  float warps[kWarps][2 * kMaxSources];
  float blocks[kMostBlocks][2 * kMaxSources];  // written by the blocks themselves
  float warp_squares[kWarps];                  // of the result
  float block_squares[kMostBlocks];

  __device__ __forceinline__ float over_warps(int slot) const {
    float sum = 0.0F;
#pragma unroll
    for (const auto& warp : warps) {
      sum += warp[slot];
    }
    return sum;
  }
};

template <bool kMore, typename Shared>  // kMore: add to what this warp has put there
__device__ __forceinline__ void put_sums(Shared& shared, int source, RowSums sums) {
  sums = {warp_sum(sums.squares), warp_sum(sums.dot)};
  if (threadIdx.x % kWarp == 0) {
    float& squares = shared.warps[threadIdx.x / kWarp][source];
    float& dot = shared.warps[threadIdx.x / kWarp][kMaxSources + source];
    squares = kMore ? squares + sums.squares : sums.squares;
    dot = kMore ? dot + sums.dot : sums.dot;
  }
}

/// `value` to shared[rank] of every block of the cluster.
__device__ __forceinline__ void to_all_blocks(float* own, int blocks, float value) {
  for (int rank = 0; rank < blocks; ++rank) {
    ptx::store_to_rank(own, static_cast<unsigned>(rank), value);
  }
}

/// From the warps' sums to those of the cluster, source `lane`'s. All threads call.
template <typename Shared>
__device__ __forceinline__ RowSums sum_cluster(Shared& shared, int count, int rank, int blocks) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  __syncthreads();  // the warps' sums are written
  if (blocks == 1) {
    return lane < count ? RowSums{shared.over_warps(lane), shared.over_warps(kMaxSources + lane)}
                        : RowSums{};
  }
  const int slot = static_cast<int>(threadIdx.x);
  if (slot < 2 * kMaxSources && slot % kMaxSources < count) {
    to_all_blocks(&shared.blocks[rank][slot], blocks, shared.over_warps(slot));
  }
  ptx::cluster_arrive_release();
  ptx::cluster_wait();  // the blocks' sums are written
  RowSums total{0.0F, 0.0F};
  for (int i = 0; i < blocks && lane < count; ++i) {
    total.squares += shared.blocks[i][lane];
    total.dot += shared.blocks[i][kMaxSources + lane];
  }
  return total;
}

/// sum_i p_i x_i of one quad; `weight` is p of source `lane`.
template <bool kAligned>
__device__ __forceinline__ Quad mix(const AggregateArgs& args, std::int64_t row, std::int64_t at,
                                    float weight, int first, Quad sum) {
  for (int i = first; i < args.sources.count; ++i) {
    const float p = __shfl_sync(kFullWarp, weight, i);
    const Quad x = load_quad<kAligned>(args.sources.at[i].row(row), at, args.dim);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      sum.v[k] = fmaf(p, x.v[k], sum.v[k]);
    }
  }
  return sum;
}

/// fn(column, quad) for the calling thread's quads of the result, sum_i p_i x_i; the first of them
/// is given. `weight`: p of source `lane`. Called by whole warps.
template <bool kAligned, typename Fn>
__device__ __forceinline__ void for_result(const AggregateArgs& args, std::int64_t row,
                                           std::int64_t at, float weight, const Quad& first,
                                           const Fn& fn) {
  fn(at, first);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (at += args.cluster_cols; at - lane * kQuad < args.dim; at += args.cluster_cols) {
    fn(at, mix<kAligned>(args, row, at, weight, 0, Quad{}));
  }
}

/// The RMSNorm of the result; `first_w`: its weights of the first quad.
template <bool kAligned, typename Shared>
__device__ __forceinline__ void normalise(const AggregateArgs& args, Shared& shared,
                                          std::int64_t row, std::int64_t at, float weight,
                                          const Quad& first, const Quad& first_w, int rank) {
  float squares = 0.0F;
  for_result<kAligned>(args, row, at, weight, first,
                       [&](std::int64_t, const Quad& x) { squares = add_squares(squares, x); });
  squares = warp_sum(squares);
  if (threadIdx.x % kWarp == 0) {
    shared.warp_squares[threadIdx.x / kWarp] = squares;
  }
  __syncthreads();  // the warps' sums are written
  float total = 0.0F;
#pragma unroll
  for (const float sum : shared.warp_squares) {
    total += sum;
  }
  if (args.cluster > 1) {
    if (threadIdx.x == 0) {
      to_all_blocks(&shared.block_squares[rank], args.cluster, total);
    }
    ptx::cluster_arrive_release();
    ptx::cluster_wait();  // the blocks' sums are written
    total = 0.0F;
    for (int i = 0; i < args.cluster; ++i) {
      total += shared.block_squares[i];
    }
  }
  const float scale = 1.0F / sqrtf(total / static_cast<float>(args.dim) + args.norm_eps);
  for_result<kAligned>(args, row, at, weight, first, [&](std::int64_t column, const Quad& x) {
    const Quad w = column == at ? first_w : load_quad<kAligned>(args.norm_w, column, args.dim);
    Quad y;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      y.v[k] = x.v[k] * scale * w.v[k];
    }
    store_quad<kAligned>(args.normed.row(row), column, args.dim, y);
  });
}

template <bool kAligned, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreadsPerSm / kThreads)
    aggregate_rows(const __grid_constant__ AggregateArgs args) {
  __shared__ SharedSums<kThreads> shared;
  const std::int64_t row = blockIdx.x >> (31 - __clz(args.cluster));
  const int rank = static_cast<int>(blockIdx.x) & (args.cluster - 1);
  const int count = args.sources.count;
  const std::int64_t at = (std::int64_t{rank} * kThreads + threadIdx.x) * kQuad;
  if (args.cluster > 1) {
    ptx::cluster_arrive();
  }
  const Quad c = load_query<kAligned>(args, at);
  const bool normed = args.normed.data != nullptr;
  const Quad norm_w = normed ? load_quad<kAligned>(args.norm_w, at, args.dim) : Quad{};
  if (args.cluster > 1) {
    ptx::cluster_wait();  // all blocks have begun: their shared memory may be written
  }
  begin_kernel();
  Quad held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (i < count) {
      held[i] = load_quad<kAligned>(args.sources.at[i].row(row), at, args.dim);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (i < count) {
      put_sums<false>(shared, i, add_sums({0.0F, 0.0F}, held[i], c));
    }
  }
  for (int i = 0; i < min(kHeld, count) && args.dim > args.cluster_cols; ++i) {
    const float* const x = args.sources.at[i].row(row);
    put_sums<true>(shared, i, column_sums<kAligned>(args, x, at + args.cluster_cols));
  }
  for (int i = kHeld; i < count; ++i) {
    const float* const x = args.sources.at[i].row(row);
    put_sums<false>(shared, i, column_sums<kAligned>(args, x, at));
  }
  const RowSums total = sum_cluster(shared, count, rank, args.cluster);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const SourceWeight source =
      softmax_weights(total.squares, total.dot, args.dim, args.eps, lane < count);
  const float weight = count == 1 ? 1.0F : source.p;  // one source: whatever the score
  Quad sum{};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (i < count) {
      const float p = __shfl_sync(kFullWarp, weight, i);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        sum.v[k] = fmaf(p, held[i].v[k], sum.v[k]);
      }
    }
  }
  const Quad first = mix<kAligned>(args, row, at, weight, kHeld, sum);
  if (args.out.data != nullptr) {
    for_result<kAligned>(args, row, at, weight, first, [&](std::int64_t column, const Quad& x) {
      store_quad<kAligned>(args.out.row(row), column, args.dim, x);
    });
  }
  if (normed) {
    normalise<kAligned>(args, shared, row, at, weight, first, norm_w, rank);
  }
}

/// How a row is cut: one block while it holds the row, for the exchange between blocks is what a
/// short row pays for; else a power of two of them.
struct RowCut {
  int threads = kMostThreads / 2;
  int blocks = 1;

  explicit RowCut(std::int64_t dim) {
    if (threads * kQuad < dim && dim <= kMostThreads * kQuad) {
      threads = kMostThreads;
    }
    while (blocks < kMostBlocks && cols() < dim) {
      blocks *= 2;
    }
  }
  [[nodiscard]] std::int64_t cols() const { return std::int64_t{blocks} * threads * kQuad; }
};

void aggregate(const ExecCtx& ctx, F32Mat out, const RowNorm& norm,
               std::span<const ConstF32Mat> sources, ConstF32Vec w, ConstF32Vec u, float eps) {
  if (sources[0].empty()) {
    return;
  }
  if (sources.size() == 1 && !norm.wanted()) {  // p = 1, whatever the score
    launch_map<1, 1>(ctx, "attn_res", whole_quads(out) && whole_quads(sources[0]),
                     {{one_slice(sources[0])}, {one_slice(out)}}, {out.size(0), 1, out.size(1)},
                     Same{});
    return;
  }
  const RowCut cut(sources[0].size(1));
  AggregateArgs args{device_mat(out), device_mat(norm.y), norm.w.data(),      norm.eps, {},
                     w.data(),        u.data(),           sources[0].size(1), eps,      cut.blocks,
                     cut.cols()};
  bool aligned = whole_quads(w) && whole_quads(u);
  aligned = aligned && (out.size(1) == 0 || whole_quads(out));
  aligned = aligned && (!norm.wanted() || (whole_quads(norm.y) && whole_quads(norm.w)));
  for (const ConstF32Mat& source : sources) {
    args.sources.at[args.sources.count++] = device_mat(source);
    aligned = aligned && whole_quads(source);
  }
  const Launch how{.grid = static_cast<unsigned>(sources[0].size(0) * cut.blocks),
                   .block = static_cast<unsigned>(cut.threads),
                   .cluster = cut.blocks};
  if (cut.threads == kMostThreads) {
    launch(ctx, "attn_res",
           aligned ? aggregate_rows<true, kMostThreads> : aggregate_rows<false, kMostThreads>, how,
           args);
  } else {
    launch(
        ctx, "attn_res",
        aligned ? aggregate_rows<true, kMostThreads / 2> : aggregate_rows<false, kMostThreads / 2>,
        how, args);
  }
}

}  // namespace

AttnResOps attn_res_ops() {
  return {.aggregate = aggregate, .aggregate_bwd = attn_res_bwd};
}

}  // namespace tandem::cuda
