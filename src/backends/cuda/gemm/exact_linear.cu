// exact_linear.cu — the linear family of gemm/exact.h, and exact_linear.cuh for fp32 weights.
#include "backends/cuda/gemm/exact.h"
#include "backends/cuda/gemm/exact_launch.h"
#include "backends/cuda/gemm/exact_linear.cuh"

namespace tandem::cuda {
namespace {

void launch_any(const ExecCtx& ctx, const char* op, const LinearShape& shape,
                std::span<const PackedWeight> weights) {
  if (shape.rows == 0 || shape.weight.out == 0) {
    return;
  }
  for (const PackedWeight& w : weights) {
    TDM_CHECK(w.format == weights.front().format, "weights of one launch have one format");
  }
  if (weights.front().format == WeightFormat::kF32) {
    launch_linear_f32(ctx, op, shape, weights);
  } else {
    launch_linear_tiled(ctx, op, shape, weights);
  }
}

}  // namespace

void launch_linear_f32(const ExecCtx& ctx, const char* op, const LinearShape& shape,
                       std::span<const PackedWeight> weights) {
  launch_linear_of<WeightFormat::kF32, LargeTile, MediumTile, SmallTile, SkinnyTile>(ctx, op, shape,
                                                                                     weights);
}

void exact_linear(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w,
                  bool accumulate) {
  const LinearShape shape{.x = x.data(),
                          .x_stride = x.stride(0),
                          .x_step = 0,
                          .y = y.data(),
                          .y_stride = y.stride(0),
                          .y_step = 0,
                          .rows = x.size(0),
                          .row_begin = nullptr,
                          .pairs = nullptr,
                          .slots = 1,
                          .accumulate = accumulate,
                          .weight = WeightShape::of(w)};
  launch_any(ctx, "linear", shape, {&w, 1});
}

void exact_linear_heads(const ExecCtx& ctx, F32Cube y, ConstF32Cube x,
                        std::span<const PackedWeight> w, bool accumulate) {
  if (w.empty()) {
    return;
  }
  const LinearShape shape{.x = x.data(),
                          .x_stride = x.stride(0),
                          .x_step = x.stride(1),
                          .y = y.data(),
                          .y_stride = y.stride(0),
                          .y_step = y.stride(1),
                          .rows = x.size(0),
                          .row_begin = nullptr,
                          .pairs = nullptr,
                          .slots = 1,
                          .accumulate = accumulate,
                          .weight = WeightShape::of(w.front())};
  launch_any(ctx, "linear_heads", shape, w);
}

void exact_linear_grouped(const ExecCtx& ctx, F32Mat y, ConstF32Mat x,
                          std::span<const PackedWeight> w, const GroupedRows& rows,
                          bool accumulate) {
  const LinearShape shape{.x = x.data(),
                          .x_stride = x.stride(0),
                          .x_step = 0,
                          .y = y.data(),
                          .y_stride = y.stride(0),
                          .y_step = 0,
                          .rows = rows.total,
                          .row_begin = rows.begin,
                          .pairs = rows.pairs,
                          .slots = rows.slots,
                          .accumulate = accumulate,
                          .weight = WeightShape::of(w.front())};
  launch_any(ctx, "experts", shape, w);
}

}  // namespace tandem::cuda
