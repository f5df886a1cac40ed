// group_launch.cuh — several independent linear layers of one weight format in one launch of the
// decode path, compiled for one format a source file.
#pragma once

#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/gemm/choose_linear.h"
#include "ops/gemm.h"

namespace tandem::cuda {

inline constexpr int kMaxGroupLayers = 16;  // of one launch

struct GroupLayer {
  const std::uint8_t* weight;  // PackedWeight::data
  const std::uint8_t* up;      // not null: of a gated layer
  TensorShape shape;
  SituParams act;
  Mat<float> y;        // [T, out]
  Mat<const float> x;  // [T, in]
  int tokens;          // T
  int first_group;     // its first group of row blocks among all layers'
};

struct LinearGroupArgs {
  GroupLayer layers[kMaxGroupLayers];
  int count;
  bool whole;  // F32Inputs, of every layer
  StreamPlan plan;
};

template <WeightFormat F>
void launch_linear_group(const ExecCtx& ctx, const LinearConfig& config,
                         const LinearGroupArgs& args);

extern template void launch_linear_group<WeightFormat::kBF16>(const ExecCtx&, const LinearConfig&,
                                                              const LinearGroupArgs&);
extern template void launch_linear_group<WeightFormat::kFp8Block>(const ExecCtx&,
                                                                  const LinearConfig&,
                                                                  const LinearGroupArgs&);
extern template void launch_linear_group<WeightFormat::kMxFp4>(const ExecCtx&, const LinearConfig&,
                                                               const LinearGroupArgs&);
extern template void launch_linear_group<WeightFormat::kNvFp4>(const ExecCtx&, const LinearConfig&,
                                                               const LinearGroupArgs&);

}  // namespace tandem::cuda
