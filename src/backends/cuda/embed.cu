// embed.cu — token embedding.   Contract: ops/embed.h   Oracle: ops/ref/embed_ref.h
// Traffic   forward: a row in, a row out; memory bound. Backward: d_y and the touched rows once,
// the
//           ids once for each row of d_y (from L2).
// Numerics  forward exact; backward: the block of an id's first row adds all rows of the id, in
//           increasing t.
// Launch    a block a row and 1,024 columns; graph-safe.
#include "backends/cuda/device_view.cuh"
#include "backends/cuda/families.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/quad.cuh"
#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

/// A block for each row (x) and kThreads quads of columns (y).
dim3 row_grid(std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kCols = kThreads * kQuad;
  return {static_cast<unsigned>(rows), static_cast<unsigned>((cols + kCols - 1) / kCols)};
}

__device__ __forceinline__ std::int64_t first_column() {
  return (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kQuad;
}

template <bool kAligned>
__device__ __forceinline__ Quad load_table(const float* row, std::int64_t at, std::int64_t n) {
  return load_quad<kAligned>(row, at, n);
}

/// bf16 are the upper halves of fp32.
template <bool kAligned>
__device__ __forceinline__ Quad load_table(const std::uint16_t* row, std::int64_t at,
                                           std::int64_t n) {
  ushort4 four{0, 0, 0, 0};
  if constexpr (kAligned) {
    if (at < n) {
      four = *reinterpret_cast<const ushort4*>(row + at);
    }
  } else {
    four.x = at < n ? row[at] : std::uint16_t{0};
    four.y = at + 1 < n ? row[at + 1] : std::uint16_t{0};
    four.z = at + 2 < n ? row[at + 2] : std::uint16_t{0};
    four.w = at + 3 < n ? row[at + 3] : std::uint16_t{0};
  }
  const auto widen = [](unsigned bits) { return __uint_as_float(bits << 16); };
  return {widen(four.x), widen(four.y), widen(four.z), widen(four.w)};
}

template <bool kAligned, typename T>
__global__ void __launch_bounds__(kThreads) embed_rows(const Mat<float> y, const Mat<const T> table,
                                                       const std::int32_t* ids, std::int64_t cols) {
  begin_kernel();
  const std::int64_t t = blockIdx.x;
  const std::int64_t at = first_column();
  const Quad quad = load_table<kAligned>(table.row(ids[t]), at, cols);
  store_quad<kAligned>(y.row(t), at, cols, quad);
}

template <typename T>
void launch_embed(const ExecCtx& ctx, F32Mat y, const WeightRef& table, ConstI32Vec ids) {
  const auto* const data = static_cast<const T*>(table.data);
  const bool aligned = whole_quads(y) && table.row_stride % kQuad == 0 &&
                       reinterpret_cast<std::uintptr_t>(data) % (kQuad * sizeof(T)) == 0;
  const auto kernel = aligned ? embed_rows<true, T> : embed_rows<false, T>;
  launch(ctx, "embed", kernel, {row_grid(y.size(0), y.size(1)), kThreads}, device_mat(y),
         Mat<const T>{data, table.row_stride}, ids.data(), y.size(1));
}

void embed(const ExecCtx& ctx, F32Mat y, const WeightRef& table, ConstI32Vec ids) {
  if (y.empty()) {
    return;
  }
  if (table.format == WeightFormat::kF32) {
    launch_embed<float>(ctx, y, table, ids);
  } else {
    launch_embed<std::uint16_t>(ctx, y, table, ids);
  }
}

/// Whether one of the rows before t has row t's id; the same answer in every thread of the block.
__device__ bool seen_before(const std::int32_t* ids, std::int64_t t) {
  const std::int32_t id = ids[t];
  bool seen = false;
  for (std::int64_t i = threadIdx.x; i < t; i += kThreads) {
    seen = seen || ids[i] == id;
  }
  return __syncthreads_or(seen) != 0;
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    embed_bwd_rows(const Mat<float> d_table, const Mat<const float> d_y, const std::int32_t* ids,
                   std::int64_t rows, std::int64_t cols) {
  begin_kernel();
  __shared__ unsigned matches[kWarps];  // of kThreads ids, a bit each
  const std::int64_t t = blockIdx.x;
  if (seen_before(ids, t)) {
    return;
  }
  const std::int32_t id = ids[t];
  const std::int64_t at = first_column();
  Quad sum = load_quad<kAligned>(d_table.row(id), at, cols);
  for (std::int64_t base = t; base < rows; base += kThreads) {
    const std::int64_t i = base + threadIdx.x;
    const unsigned mask = __ballot_sync(kFullWarp, i < rows && ids[i] == id);
    if (threadIdx.x % kWarp == 0) {
      matches[threadIdx.x / kWarp] = mask;
    }
    __syncthreads();  // all masks are written
    for (int warp = 0; warp < kWarps; ++warp) {
      for (unsigned left = matches[warp]; left != 0; left &= left - 1) {
        const std::int64_t row = base + warp * kWarp + __ffs(static_cast<int>(left)) - 1;
        const Quad add = load_quad<kAligned>(d_y.row(row), at, cols);
#pragma unroll
        for (int k = 0; k < kQuad; ++k) {
          sum.v[k] += add.v[k];
        }
      }
    }
    __syncthreads();  // all masks are read
  }
  store_quad<kAligned>(d_table.row(id), at, cols, sum);
}

void embed_bwd(const ExecCtx& ctx, F32Mat d_table, ConstF32Mat d_y, ConstI32Vec ids) {
  if (d_y.empty()) {
    return;
  }
  const auto kernel =
      whole_quads(d_table) && whole_quads(d_y) ? embed_bwd_rows<true> : embed_bwd_rows<false>;
  launch(ctx, "embed_bwd", kernel, {row_grid(d_y.size(0), d_y.size(1)), kThreads},
         device_mat(d_table), device_mat(d_y), ids.data(), d_y.size(0), d_y.size(1));
}

}  // namespace

EmbedOps embed_ops() {
  return {.embed = embed, .embed_bwd = embed_bwd};
}

}  // namespace tandem::cuda
