// exact_grad.cu — d_w += d_y^T x, one chain over the rows an element, continued from d_w.
// Contract: ops/gemm.h   Oracle: ops/ref/gemm_ref.h
// Launch    grid (tiles of inputs, tiles of outputs, weights); the tile's rows are outputs, its
//           columns inputs, and the reduction runs over rows of d_y and x, each read where it is.
// Numerics  exact_tile.cuh.   Graph-safe.
#include "backends/cuda/gemm/exact.h"
#include "backends/cuda/gemm/exact_linear.cuh"
#include "backends/cuda/launch.cuh"

namespace tandem::cuda {
namespace {

struct GradShape {
  const float* d_y;
  std::int64_t d_y_stride;
  const float* x;
  std::int64_t x_stride;
  std::int64_t rows;  // of every weight; grouped: of all
  std::int64_t n;
  std::int64_t k;
  const std::int32_t* row_begin;  // grouped: see GroupedRows; else null
  const std::int32_t* pairs;
  std::int32_t slots;
};

struct GradTarget {
  float* d_w;
  std::int64_t stride;
};

template <int kCount>
struct GradArgs {
  GradShape shape;
  GradTarget targets[std::size_t{kCount}];
};

/// Columns of a matrix, from `first` on: the reduction runs over its rows `begin` ... `end` - 1.
struct ColumnsOperand {
  static constexpr bool kDepthContiguous = false;
  using Raw = float;
  const float* data;
  std::int64_t stride;
  const std::int32_t* pairs;
  std::int32_t slots;
  std::int64_t first;
  std::int64_t cols;
  std::int64_t begin;
  std::int64_t end;

  __device__ Raw fetch(int wide, std::int64_t depth) const {
    std::int64_t row = begin + depth;
    if (first + wide >= cols || row >= end) {
      return 0.0F;
    }
    if (pairs != nullptr) {
      row = pairs[row] / slots;
    }
    return data[row * stride + first + wide];
  }
  __device__ float value(Raw raw) const { return raw; }
};

template <typename Tile, int kCount>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    weight_grad_kernel(const __grid_constant__ GradArgs<kCount> args) {
  begin_kernel();
  const GradShape& s = args.shape;
  const std::int64_t z = blockIdx.z;
  const std::int64_t begin = s.row_begin == nullptr ? 0 : s.row_begin[z];
  const std::int64_t end = s.row_begin == nullptr ? s.rows : s.row_begin[z + 1];
  if (begin >= end) {
    return;
  }
  const std::int64_t n = std::int64_t{blockIdx.y} * Tile::kM;
  const std::int64_t k = std::int64_t{blockIdx.x} * Tile::kN;
  const ColumnsOperand d_y{s.d_y, s.d_y_stride, nullptr, 1, n, s.n, begin, end};
  const ColumnsOperand x{s.x, s.x_stride, s.pairs, s.slots, k, s.k, begin, end};
  const GradTarget target = args.targets[z];
  float* const d_w = target.d_w + n * target.stride + k;
  Sums<Tile> sums;
  begin_sums<Tile>(d_w, target.stride, s.n - n, s.k - k, sums);
  multiply_tile<Tile>(d_y, x, end - begin, sums);
  end_sums<Tile>(d_w, target.stride, s.n - n, s.k - k, sums);
}

template <int kCount>
void launch_grads(const ExecCtx& ctx, const char* op, const GradShape& shape,
                  std::span<const F32Mat> targets) {
  if (shape.rows == 0 || shape.n == 0 || shape.k == 0) {
    return;
  }
  const auto count = static_cast<std::int64_t>(targets.size());
  GradArgs<kCount> args{};
  args.shape = shape;
  for (std::int64_t begin = 0; begin < count; begin += kCount) {
    const std::int64_t here = std::min<std::int64_t>(kCount, count - begin);
    for (std::int64_t i = 0; i < here; ++i) {
      const F32Mat& target = targets[static_cast<std::size_t>(begin + i)];
      args.targets[i] = {target.data(), target.stride(0)};
    }
    with_tile<MediumTile, SmallTile, SkinnyTile>(ctx, shape.n, shape.k, here, [&](auto tile) {
      using Tile = decltype(tile);
      const dim3 grid(static_cast<unsigned>(tiles_of(shape.k, Tile::kN)),
                      static_cast<unsigned>(tiles_of(shape.n, Tile::kM)),
                      static_cast<unsigned>(here));
      launch(ctx, op, weight_grad_kernel<Tile, kCount>, {grid, Tile::kThreads}, args);
    });
    args.shape.row_begin += shape.row_begin == nullptr ? 0 : here;
  }
}

}  // namespace

void exact_weight_grad(const ExecCtx& ctx, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x) {
  const GradShape shape{.d_y = d_y.data(),
                        .d_y_stride = d_y.stride(0),
                        .x = x.data(),
                        .x_stride = x.stride(0),
                        .rows = x.size(0),
                        .n = d_y.size(1),
                        .k = x.size(1),
                        .row_begin = nullptr,
                        .pairs = nullptr,
                        .slots = 1};
  launch_grads<1>(ctx, "weight_grad", shape, {&d_w, 1});
}

void exact_weight_grad_grouped(const ExecCtx& ctx, std::span<const F32Mat> d_w, ConstF32Mat d_y,
                               ConstF32Mat x, const GroupedRows& rows) {
  const GradShape shape{.d_y = d_y.data(),
                        .d_y_stride = d_y.stride(0),
                        .x = x.data(),
                        .x_stride = x.stride(0),
                        .rows = rows.total,
                        .n = d_y.size(1),
                        .k = x.size(1),
                        .row_begin = rows.begin,
                        .pairs = rows.pairs,
                        .slots = rows.slots};
  launch_grads<kWeightsPerLaunch>(ctx, "experts_bwd", shape, d_w);
}

}  // namespace tandem::cuda
