// optim_muon.cu — one Muon step.   Contract: ops/optim.h   Oracle: ops/ref/optim_ref.h
// Math      x = the Nesterov update, turned so that rows <= cols, x / |x|_F; five times:
//           A = x x^T,  P = b A + c A A,  x <- a x + P x;  then w -= lr (scale x + decay w)
// Cost      five times 2 r (2 r c + r^2) fp32 operations, r = min, c = max of the sizes.
// Numerics  every product is one fused multiply-add chain over its inner index, as on the CPU.
// Launch    products in tiles of 64 x 64, a thread 4 x 4 of it; nothing is read by the host.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/gemm/layout.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/optim_kernels.h"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxGridY = 65535;

/// c [m, n] = factor a [m, k] b [k, n] + add d [m, n], row-major and contiguous; d null: no second
/// term.
struct Product {
  float* c;
  const float* a;
  const float* b;  // [n, k] when transposed
  const float* d;
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;
  float factor;
  float add;
};

constexpr int kTile = 64;   // of rows and columns of c
constexpr int kDepth = 16;  // of k at a time
constexpr int kMicro = 4;   // a thread's rows and columns
constexpr int kSide = kTile / kMicro;
constexpr int kPad = 4;  // keeps float4 alignment; spreads a column over the banks
static_assert(kSide * kSide == kThreads && kTile * kDepth == kMicro * kThreads);

struct ProductTiles {
  alignas(16) float a[kDepth][kTile + kPad];  // transposed: a thread reads rows as one vector
  alignas(16) float b[kDepth][kTile + kPad];
};

struct Operand {
  const float* data;
  std::int64_t width;  // its rows or columns that run along c
  std::int64_t depth;  // its extent along k
};

using Tile = float (&)[kDepth][kTile + kPad];

/// Of x [width, depth]: x[at .. at + kTile, k0 .. k0 + kDepth) into tile[depth][row].
__device__ __forceinline__ void load_turned(Tile tile, const Operand& x, std::int64_t at,
                                            std::int64_t k0) {
#pragma unroll
  for (int part = 0; part < kMicro; ++part) {
    const int index = part * kThreads + static_cast<int>(threadIdx.x);
    const int depth = index % kDepth;
    const int row = index / kDepth;
    const bool inside = at + row < x.width && k0 + depth < x.depth;
    tile[depth][row] = inside ? x.data[(at + row) * x.depth + k0 + depth] : 0.0F;
  }
}

/// Of x [depth, width]: x[k0 .. k0 + kDepth, at .. at + kTile) into tile[depth][col].
__device__ __forceinline__ void load_straight(Tile tile, const Operand& x, std::int64_t at,
                                              std::int64_t k0) {
#pragma unroll
  for (int part = 0; part < kMicro; ++part) {
    const int index = part * kThreads + static_cast<int>(threadIdx.x);
    const int col = index % kTile;
    const int depth = index / kTile;
    const bool inside = at + col < x.width && k0 + depth < x.depth;
    tile[depth][col] = inside ? x.data[(k0 + depth) * x.width + at + col] : 0.0F;
  }
}

template <bool kTransposed>
__global__ void __launch_bounds__(kThreads) product_kernel(const Product p) {
  begin_kernel();
  __shared__ ProductTiles tiles;
  const int ty = static_cast<int>(threadIdx.x) / kSide;
  const int tx = static_cast<int>(threadIdx.x) % kSide;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const std::int64_t col0 = static_cast<std::int64_t>(blockIdx.y) * kTile;
  const Operand a{p.a, p.m, p.k};
  const Operand b{p.b, p.n, p.k};
  float sums[kMicro][kMicro] = {};
  for (std::int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
    load_turned(tiles.a, a, row0, k0);
    if constexpr (kTransposed) {
      load_turned(tiles.b, b, col0, k0);
    } else {
      load_straight(tiles.b, b, col0, k0);
    }
    __syncthreads();  // the tiles are complete
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
      const float4 left = *reinterpret_cast<const float4*>(&tiles.a[depth][ty * kMicro]);
      const float4 right = *reinterpret_cast<const float4*>(&tiles.b[depth][tx * kMicro]);
      const float rows[kMicro] = {left.x, left.y, left.z, left.w};
      const float cols[kMicro] = {right.x, right.y, right.z, right.w};
#pragma unroll
      for (int i = 0; i < kMicro; ++i) {
#pragma unroll
        for (int j = 0; j < kMicro; ++j) {
          sums[i][j] = fmaf(rows[i], cols[j], sums[i][j]);
        }
      }
    }
    __syncthreads();  // read by all before the next tiles are loaded
  }
#pragma unroll
  for (int i = 0; i < kMicro; ++i) {
#pragma unroll
    for (int j = 0; j < kMicro; ++j) {
      const std::int64_t row = row0 + ty * kMicro + i;
      const std::int64_t col = col0 + tx * kMicro + j;
      if (row < p.m && col < p.n) {
        const std::int64_t at = row * p.n + col;
        const float old = p.d == nullptr ? 0.0F : p.add * p.d[at];
        p.c[at] = fmaf(p.factor, sums[i][j], old);
      }
    }
  }
}

template <bool kTransposed>
void multiply(const ExecCtx& ctx, const Product& p) {
  const dim3 grid(checked_cast<unsigned>(tiles_of(p.m, kTile)),
                  checked_cast<unsigned>(tiles_of(p.n, kTile)));
  launch(ctx, "muon: product", product_kernel<kTransposed>, {grid, kThreads}, p);
}

struct MuonArgs {
  Mat<float> w;         // [N, K]
  Mat<float> momentum;  // [N, K]
  Mat<const float> g;   // [N, K]
  float* x;             // the update, [min, max] of (N, K): turned when the matrix is tall
  std::int64_t rows;
  std::int64_t cols;
  MuonParams p;
  float scale;  // of the orthogonalised update

  __device__ float& update(std::int64_t i, std::int64_t j) const {
    return x[rows > cols ? j * rows + i : i * cols + j];
  }
};

/// fn(i, j) for every element of [rows, cols]: blockIdx.x and threads over columns.
template <typename Fn>
__device__ __forceinline__ void each_of(const MuonArgs& args, const Fn& fn) {
  const std::int64_t j = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= args.cols) {
    return;
  }
  for (std::int64_t i = blockIdx.y; i < args.rows; i += gridDim.y) {
    fn(i, j);
  }
}

__global__ void __launch_bounds__(kThreads) momentum_kernel(const MuonArgs args) {
  begin_kernel();
  each_of(args, [&](std::int64_t i, std::int64_t j) {
    const float grad = args.g.row(i)[j] * args.p.grad_scale;
    const float moved = fmaf(args.p.momentum, args.momentum.row(i)[j], grad);
    args.momentum.row(i)[j] = moved;
    args.update(i, j) = fmaf(args.p.momentum, moved, grad);
  });
}

/// x / |x|_F; a zero x stays zero.
__global__ void __launch_bounds__(kThreads)
    normalise_kernel(const MuonArgs args, const double* squares) {
  begin_kernel();
  const double norm = sqrt(*squares);
  const float inverse = norm > 0.0 ? static_cast<float>(1.0 / norm) : 0.0F;
  each_of(args, [&](std::int64_t i, std::int64_t j) { args.update(i, j) *= inverse; });
}

__global__ void __launch_bounds__(kThreads) step_kernel(const MuonArgs args) {
  begin_kernel();
  each_of(args, [&](std::int64_t i, std::int64_t j) {
    const float weight = args.w.row(i)[j];
    const float change = fmaf(args.p.weight_decay, weight, args.scale * args.update(i, j));
    args.w.row(i)[j] = fmaf(-args.p.lr, change, weight);
  });
}

dim3 element_grid(const MuonArgs& args) {
  return {checked_cast<unsigned>(tiles_of(args.cols, kThreads)),
          checked_cast<unsigned>(std::min(args.rows, kMaxGridY))};
}

/// Five Newton-Schulz steps on x [rows, cols], rows <= cols; returns where the result lies.
float* orthogonalise(const ExecCtx& ctx, float* x, std::int64_t rows, std::int64_t cols) {
  constexpr float kA = 3.4445F;
  constexpr float kB = -4.7750F;
  constexpr float kC = 2.0315F;
  float* next = ctx.workspace->take<float>(rows * cols).data();
  float* const gram = ctx.workspace->take<float>(rows * rows).data();
  float* const poly = ctx.workspace->take<float>(rows * rows).data();
  for (int step = 0; step < 5; ++step) {
    multiply<true>(ctx, {gram, x, x, nullptr, rows, rows, cols, 1, 0});
    multiply<false>(ctx, {poly, gram, gram, gram, rows, rows, rows, kC, kB});
    multiply<false>(ctx, {next, poly, x, x, rows, cols, rows, 1, kA});
    std::swap(x, next);
  }
  return x;
}

}  // namespace

void muon(const ExecCtx& ctx, F32Mat w, F32Mat momentum, ConstF32Mat g, const MuonParams& params) {
  if (w.empty()) {
    return;
  }
  const std::int64_t rows = w.size(0);
  const std::int64_t cols = w.size(1);
  const ArenaScope scope(*ctx.workspace);
  const std::span<float> x = ctx.workspace->take<float>(rows * cols);
  MuonArgs args{
      device_mat(w), device_mat(momentum),
      device_mat(g), x.data(),
      rows,          cols,
      params,        params.update_scale * std::sqrt(static_cast<float>(std::max(rows, cols)))};
  launch(ctx, "muon: momentum", momentum_kernel, {element_grid(args), kThreads}, args);
  const double* const squares = device_sum_squares(ctx, x);
  launch(ctx, "muon: normalise", normalise_kernel, {element_grid(args), kThreads}, args, squares);
  args.x = orthogonalise(ctx, x.data(), std::min(rows, cols), std::max(rows, cols));
  launch(ctx, "muon: step", step_kernel,
         {.grid = element_grid(args), .block = kThreads, .writes_weights = true}, args);
}

}  // namespace tandem::cuda
