// mla_prepare.cu — both norms in front of MLA's attention, the shared channels, and the cache
// write.   Contract: ops/mla.h   Oracle: norm.cu, mla.cu
// Traffic   each operand once; the norms' weights are read before the kernel before has ended.
// Schedule  Blocks (t, 0) norm the query latents of row t, blocks (t, 1) its cache row.
// Numerics  those of rms_norm: a thread sums its quads in order, then lanes, then warps.
// Launch    grid depends on shapes only; graph-safe.
#include <algorithm>
#include <cmath>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/mla/latent_row.cuh"
#include "backends/cuda/mla/mla.cuh"
#include "backends/cuda/row_group.cuh"

namespace tandem::cuda {
namespace {

constexpr int kHeld = 2;  // quads a thread keeps: rows of 2,048 are read once

struct Prepare {
  Mat<float> cq;    // data null: not wanted
  Mat<float> kv;    // data null: not wanted
  std::byte* rows;  // null: not wanted
  std::int64_t row_bytes;
  LatentFormat format;
  Mat<const float> cq_raw, kv_raw;
  const float* q_weight;
  const float* kv_weight;
  const std::int32_t* slots;
  std::int64_t count;
  std::int64_t query;
  std::int64_t latent;
  std::int64_t width;
  float q_eps;
  float kv_eps;
};

/// The weights of this thread's first quads.
template <bool kAligned>
struct HeldWeights {
  Quad quad[kHeld];

  __device__ HeldWeights(const float* w, std::int64_t n) {
#pragma unroll
    for (int q = 0; q < kHeld; ++q) {
      quad[q] = load_quad<kAligned>(w, quad_start<BlockGroup>(q), n);
    }
  }
};

/// put(start, quad) for every quad of this thread, x scale w.
template <bool kAligned, typename PutFn>
__device__ __forceinline__ void norm_row(const float* x, const float* w,
                                         const HeldWeights<kAligned>& held_w, std::int64_t n,
                                         float eps, const PutFn& put) {
  Quad held[kHeld];
#pragma unroll
  for (int q = 0; q < kHeld; ++q) {
    held[q] = load_quad<kAligned>(x, quad_start<BlockGroup>(q), n);
  }
  float squares = 0.0F;
#pragma unroll
  for (int q = 0; q < kHeld; ++q) {
    squares = add_squares(squares, held[q]);
  }
  const std::int64_t rest = quad_start<BlockGroup>(kHeld);
  constexpr std::int64_t kStep = BlockGroup::kSize * kQuad;
  for (std::int64_t at = rest; at < n; at += kStep) {
    squares = add_squares(squares, load_quad<kAligned>(x, at, n));
  }
  const float scale = 1.0F / sqrtf(BlockGroup::sum(squares) / static_cast<float>(n) + eps);
  const auto finish = [&](std::int64_t at, const Quad& from, const Quad& by) {
    Quad y;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      y.v[i] = from.v[i] * scale * by.v[i];
    }
    put(at, y);
  };
#pragma unroll
  for (int q = 0; q < kHeld; ++q) {
    finish(quad_start<BlockGroup>(q), held[q], held_w.quad[q]);
  }
  for (std::int64_t at = rest; at < n; at += kStep) {
    finish(at, load_quad<kAligned>(x, at, n), load_quad<kAligned>(w, at, n));
  }
}

template <bool kAligned>
__device__ __forceinline__ void prepare_query(const Prepare& x) {
  const HeldWeights<kAligned> weights(x.q_weight, x.query);
  begin_kernel();
  for (std::int64_t t = blockIdx.x; t < x.count; t += gridDim.x) {
    float* const to = x.cq.row(t);
    norm_row<kAligned>(
        x.cq_raw.row(t), x.q_weight, weights, x.query, x.q_eps,
        [&](std::int64_t at, const Quad& quad) { store_quad<kAligned>(to, at, x.query, quad); });
  }
}

template <bool kAligned>
__device__ __forceinline__ void prepare_keys(const Prepare& x) {
  const HeldWeights<kAligned> weights(x.kv_weight, x.latent);
  begin_kernel();
  const std::int64_t shared = x.width - x.latent;
  for (std::int64_t t = blockIdx.x; t < x.count; t += gridDim.x) {
    const float* const from = x.kv_raw.row(t);
    const std::int32_t slot = x.rows == nullptr ? -1 : x.slots[t];
    // Quads of the part that begins at `begin` and has n elements.
    const auto put = [&](std::int64_t begin, std::int64_t n, std::int64_t at, const Quad& quad) {
      if (x.kv.data != nullptr) {
        store_quad<kAligned>(x.kv.row(t) + begin, at, n, quad);
      }
      if (slot >= 0) {
        std::byte* const row = x.rows + slot * x.row_bytes + begin * element_bytes(x.format);
        store_latent_quad<kAligned>(row, x.format, at, n, quad);
      }
    };
    // From the last thread down: the first ones have the norm.
    for (std::int64_t at = (BlockGroup::kSize - 1 - BlockGroup::rank()) * kQuad; at < shared;
         at += BlockGroup::kSize * kQuad) {
      put(x.latent, shared, at, load_quad<kAligned>(from + x.latent, at, shared));
    }
    norm_row<kAligned>(from, x.kv_weight, weights, x.latent, x.kv_eps,
                       [&](std::int64_t at, const Quad& quad) { put(0, x.latent, at, quad); });
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kRowThreads) prepare_rows(const Prepare x) {
  if (blockIdx.y == 1) {
    prepare_keys<kAligned>(x);
  } else if (x.cq.data != nullptr) {
    prepare_query<kAligned>(x);
  } else {
    begin_kernel();
  }
}

}  // namespace

void mla_prepare(const ExecCtx& ctx, const MlaPrepare& args) {
  const std::int64_t rows = args.kv_raw.size(0);
  if (rows == 0) {
    return;
  }
  const std::int64_t latent = args.kv_weight.size(0);
  const bool aligned =
      (args.cq.empty() ||
       (whole_quads(args.cq) && whole_quads(args.cq_raw) && whole_quads(args.q_weight))) &&
      (args.kv.empty() || whole_quads(args.kv)) && (args.rows.empty() || whole_quads(args.rows)) &&
      whole_quads(args.kv_raw) && whole_quads(args.kv_weight);
  const Prepare x{.cq = {args.cq.empty() ? nullptr : args.cq.data(), args.cq.stride(0)},
                  .kv = {args.kv.empty() ? nullptr : args.kv.data(), args.kv.stride(0)},
                  .rows = args.rows.empty() ? nullptr : args.rows.data,
                  .row_bytes = args.rows.row_bytes,
                  .format = args.rows.format,
                  .cq_raw = device_mat(args.cq_raw),
                  .kv_raw = device_mat(args.kv_raw),
                  .q_weight = args.q_weight.data(),
                  .kv_weight = args.kv_weight.data(),
                  .slots = args.slot_mapping.data(),
                  .count = rows,
                  .query = args.cq.size(1),
                  .latent = latent,
                  .width = args.kv_raw.size(1),
                  .q_eps = args.q_eps,
                  .kv_eps = args.kv_eps};
  constexpr std::int64_t kMaxBlocks = 65535;
  const dim3 grid(static_cast<unsigned>(std::min(rows, kMaxBlocks)), 2);
  launch(ctx, "mla_prepare", aligned ? prepare_rows<true> : prepare_rows<false>,
         {grid, kRowThreads}, x);
}

}  // namespace tandem::cuda
