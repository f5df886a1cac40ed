// linear_launch.cuh — the kernels of linear layers, compiled for one weight format a source file.
#pragma once

#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/gemm/choose_linear.h"
#include "ops/exec_ctx.h"

namespace tandem::cuda {

inline constexpr int kMaxHeads = 128;  // of one launch

struct TensorLinearArgs {
  const std::uint8_t* weights[kMaxHeads];  // PackedWeight::data of each head
  TensorShape shape;                       // of all of them
  Cube<float> y;                           // [T, H, out]
  Cube<const float> x;                     // [T, H, in], decode path
  Cube<const std::uint16_t> x_bf16;        // [T, H, in filled up to tiles], the path for many rows
  std::int64_t tokens;                     // T
  bool accumulate;
  bool whole;  // F32Inputs
  StreamPlan plan;
  int cluster;
};

/// y = (base + first product) + second product on the decode path.
struct LinearSumArgs {
  const std::uint8_t* weights[2];  // PackedWeight::data
  TensorShape shapes[2];
  Mat<const float> x[2];  // [T, in]
  Mat<float> y;           // [T, out]
  Mat<const float> base;  // [T, out]; null data: none
  int tokens;             // T
  bool whole;             // F32Inputs
  StreamPlan plan;
};

/// Of one product, or of two.
template <WeightFormat F>
void launch_linear_sum(const ExecCtx& ctx, const LinearConfig& config, const LinearSumArgs& args,
                       int terms);
template <WeightFormat F>
void launch_linear(const ExecCtx& ctx, const LinearConfig& config, const TensorLinearArgs& args,
                   int heads);

extern template void launch_linear_sum<WeightFormat::kBF16>(const ExecCtx&, const LinearConfig&,
                                                            const LinearSumArgs&, int);
extern template void launch_linear<WeightFormat::kBF16>(const ExecCtx&, const LinearConfig&,
                                                        const TensorLinearArgs&, int);
extern template void launch_linear_sum<WeightFormat::kFp8Block>(const ExecCtx&, const LinearConfig&,
                                                                const LinearSumArgs&, int);
extern template void launch_linear<WeightFormat::kFp8Block>(const ExecCtx&, const LinearConfig&,
                                                            const TensorLinearArgs&, int);
extern template void launch_linear_sum<WeightFormat::kMxFp4>(const ExecCtx&, const LinearConfig&,
                                                             const LinearSumArgs&, int);
extern template void launch_linear<WeightFormat::kMxFp4>(const ExecCtx&, const LinearConfig&,
                                                         const TensorLinearArgs&, int);
extern template void launch_linear_sum<WeightFormat::kNvFp4>(const ExecCtx&, const LinearConfig&,
                                                             const LinearSumArgs&, int);
extern template void launch_linear<WeightFormat::kNvFp4>(const ExecCtx&, const LinearConfig&,
                                                         const TensorLinearArgs&, int);

}  // namespace tandem::cuda
