// exact_linear.cuh — y = x W^T, one chain an output.   Contract: ops/gemm.h   Oracle:
// ops/ref/gemm_ref.h
// Launch    grid (tiles of outputs, tiles of rows, weights). With grouped rows the number of a
//           weight's rows is known on the device only: blocks stride over its tiles of rows.
// Numerics  exact_tile.cuh.   Graph-safe.
#pragma once

#include <algorithm>
#include <span>

#include "backends/cuda/gemm/exact_tile.cuh"
#include "backends/cuda/gemm/weight_reader.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/runtime/cuda_device.h"

namespace tandem::cuda {

struct LinearShape {
  const float* x;
  std::int64_t x_stride;
  std::int64_t x_step;  // from one weight's x to the next one's
  float* y;
  std::int64_t y_stride;
  std::int64_t y_step;
  std::int64_t rows;              // of every weight; grouped: of all
  const std::int32_t* row_begin;  // grouped: see GroupedRows; else null
  const std::int32_t* pairs;
  std::int32_t slots;
  bool accumulate;
  WeightShape weight;
};

/// Weights by value; a launch takes up to kCount.
template <int kCount>
struct LinearArgs {
  LinearShape shape;
  const std::uint8_t* weights[std::size_t{kCount}];
};
inline constexpr int kWeightsPerLaunch = 896;  // K3's experts; 7 KiB of the 32 a launch may carry

/// Rows of a row-major matrix: each one's offset lies in shared memory (in registers they would
/// cost too many), -1 where the tile has none.
struct RowsOperand {
  static constexpr bool kDepthContiguous = true;
  using Raw = float;
  const float* data;
  const std::int64_t* offsets;
  std::int64_t depth;

  __device__ Raw fetch(int wide, std::int64_t k) const {
    const std::int64_t offset = offsets[wide];
    return offset >= 0 && k < depth ? data[offset + k] : 0.0F;
  }
  __device__ float value(Raw raw) const { return raw; }
};

/// Outputs of a weight that is kept in tiles.
template <WeightFormat kFormat>
struct TiledOperand {
  static constexpr bool kDepthContiguous = true;
  using Raw = typename WeightReader<kFormat>::Raw;
  WeightReader<kFormat> reader;
  std::int64_t first;  // output of the tile's first column
  std::int64_t out;
  std::int64_t in;

  __device__ Raw fetch(int wide, std::int64_t k) const {
    return first + wide < out && k < in ? reader.fetch(first + wide, k) : Raw{};
  }
  __device__ float value(Raw raw) const { return reader.value(raw); }
};

/// Outputs from `first` on. `offsets`: kN places in shared memory, which this fills; a barrier must
/// follow.
template <typename Tile, WeightFormat kFormat>
__device__ __forceinline__ auto weight_operand(const std::uint8_t* weight, const WeightShape& shape,
                                               std::int64_t first, std::int64_t* offsets) {
  if constexpr (kFormat == WeightFormat::kF32) {
    for (int n = static_cast<int>(threadIdx.x); n < Tile::kN; n += Tile::kThreads) {
      offsets[n] = first + n < shape.out ? (first + n) * shape.in : -1;
    }
    return RowsOperand{reinterpret_cast<const float*>(weight), offsets, shape.in};
  } else {
    return TiledOperand<kFormat>{{weight, shape}, first, shape.out, shape.in};
  }
}

template <typename Tile, WeightFormat kFormat, int kCount>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    linear_kernel(const __grid_constant__ LinearArgs<kCount> args) {
  begin_kernel();
  const LinearShape& s = args.shape;
  const std::int64_t z = blockIdx.z;
  const std::int64_t begin = s.row_begin == nullptr ? 0 : s.row_begin[z];
  const std::int64_t end = s.row_begin == nullptr ? s.rows : s.row_begin[z + 1];
  std::int64_t row = begin + std::int64_t{blockIdx.y} * Tile::kM;
  if (row >= end) {
    return;
  }
  __shared__ std::int64_t x_offsets[Tile::kM];
  __shared__ std::int64_t w_offsets[Tile::kN];
  const std::int64_t first = std::int64_t{blockIdx.x} * Tile::kN;
  const RowsOperand x{s.x + z * s.x_step, x_offsets, s.weight.in};
  const auto w = weight_operand<Tile, kFormat>(args.weights[z], s.weight, first, w_offsets);
  for (; row < end; row += std::int64_t{gridDim.y} * Tile::kM) {
    const std::int64_t rows = end - row;
    for (int m = static_cast<int>(threadIdx.x); m < Tile::kM; m += Tile::kThreads) {
      std::int64_t from = row + m;
      if (s.pairs != nullptr && m < rows) {
        from = s.pairs[from] / s.slots;
      }
      x_offsets[m] = m < rows ? from * s.x_stride : -1;
    }
    __syncthreads();  // the offsets are there
    float* const y = s.y + z * s.y_step + row * s.y_stride + first;
    Sums<Tile> sums;
    begin_sums<Tile>(s.accumulate ? y : nullptr, s.y_stride, rows, s.weight.out - first, sums);
    multiply_tile<Tile>(x, w, s.weight.in, sums);
    end_sums<Tile>(y, s.y_stride, rows, s.weight.out - first, sums);
    __syncthreads();  // nobody reads these offsets any more
  }
}

/// Blocks of one tile shape over `weights` weights, each with about `rows` rows.
template <typename Tile>
[[nodiscard]] std::int64_t tile_count(std::int64_t rows, std::int64_t cols, std::int64_t weights) {
  return weights * tiles_of(rows, Tile::kM) * tiles_of(cols, Tile::kN);
}

/// Calls fn(tile) with the first of `Tiles...` (largest first) that rows fill by half and that
/// makes a block for every SM, or with the last one.
template <typename First, typename... Rest, typename Fn>
void with_tile(const ExecCtx& ctx, std::int64_t rows, std::int64_t cols, std::int64_t weights,
               const Fn& fn) {
  if constexpr (sizeof...(Rest) == 0) {
    fn(First{});
  } else {
    if (2 * rows >= First::kM &&
        tile_count<First>(rows, cols, weights) >= device_of(ctx).info().num_sms) {
      fn(First{});
    } else {
      with_tile<Rest...>(ctx, rows, cols, weights, fn);
    }
  }
}

/// Tiles of rows along a grid axis: all of them, or where rows are grouped twice the mean of a
/// weight, since blocks stride over what is left.
[[nodiscard]] inline unsigned row_blocks(std::int64_t rows, std::int64_t mean_rows, int tile) {
  const std::int64_t wanted = std::min(tiles_of(rows, tile), 2 * tiles_of(mean_rows, tile));
  return static_cast<unsigned>(std::clamp<std::int64_t>(wanted, 1, 65535));
}

template <WeightFormat kFormat, int kCount, typename... Tiles>
void launch_linear(const ExecCtx& ctx, const char* op, const LinearShape& shape,
                   std::span<const PackedWeight> weights) {
  const auto count = static_cast<std::int64_t>(weights.size());
  const std::int64_t mean_rows =
      shape.row_begin == nullptr ? shape.rows : tiles_of(shape.rows, count);
  LinearArgs<kCount> args{};
  args.shape = shape;
  for (std::int64_t begin = 0; begin < count; begin += kCount) {
    const std::int64_t here = std::min<std::int64_t>(kCount, count - begin);
    for (std::int64_t i = 0; i < here; ++i) {
      args.weights[i] = reinterpret_cast<const std::uint8_t*>(
          weights[static_cast<std::size_t>(begin + i)].data.data());
    }
    const std::int64_t active = shape.row_begin == nullptr ? here : std::min(here, shape.rows);
    with_tile<Tiles...>(ctx, mean_rows, shape.weight.out, active, [&](auto tile) {
      using Tile = decltype(tile);
      const dim3 grid(static_cast<unsigned>(tiles_of(shape.weight.out, Tile::kN)),
                      row_blocks(shape.rows, mean_rows, Tile::kM), static_cast<unsigned>(here));
      launch(ctx, op, linear_kernel<Tile, kFormat, kCount>, {grid, Tile::kThreads}, args);
    });
    args.shape.x += here * shape.x_step;
    args.shape.y += here * shape.y_step;
    args.shape.row_begin += shape.row_begin == nullptr ? 0 : here;
  }
}

/// One weight, or several.
template <WeightFormat kFormat, typename... Tiles>
void launch_linear_of(const ExecCtx& ctx, const char* op, const LinearShape& shape,
                      std::span<const PackedWeight> weights) {
  if (weights.size() == 1) {
    launch_linear<kFormat, 1, Tiles...>(ctx, op, shape, weights);
  } else {
    launch_linear<kFormat, kWeightsPerLaunch, Tiles...>(ctx, op, shape, weights);
  }
}

}  // namespace tandem::cuda
