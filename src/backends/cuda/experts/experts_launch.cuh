// experts_launch.cuh — the kernels of the routed experts, compiled for one weight format a source
// file.
#pragma once

#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/experts/choose_experts.h"
#include "backends/cuda/experts/work.cuh"
#include "ops/act.h"
#include "ops/exec_ctx.h"

namespace tandem::cuda {

inline constexpr int kMaxExperts = 1024;

/// hidden = SiTU(x w1^T, x w3^T), a row a pair.
struct GateUpArgs {
  const std::uint8_t* w1[kMaxExperts];  // PackedWeight::data
  const std::uint8_t* w3[kMaxExperts];
  ExpertWork work;
  TensorShape shape;                // [F, DX]
  Mat<const float> x;               // [T, DX], decode path
  Mat<const std::uint16_t> x_bf16;  // [T, DX filled up to tiles], the path for many rows
  Mat<std::uint16_t> hidden;        // [T*A, F filled up to tiles]
  std::int32_t slots;               // A
  bool whole;                       // F32Inputs
  SituParams act;
  StreamPlan plan;
  RingPlan ring;
};

/// y = hidden w2^T, a row a pair.
struct DownArgs {
  const std::uint8_t* w2[kMaxExperts];
  ExpertWork work;
  TensorShape shape;  // [DX, F]
  Mat<const std::uint16_t> hidden;
  Mat<float> y;  // [T*A, DX]
  StreamPlan plan;
  RingPlan ring;
};

template <WeightFormat F>
void launch_gate_up(const ExecCtx& ctx, const ExpertsConfig& config, const GateUpArgs& args);
template <WeightFormat F>
void launch_down(const ExecCtx& ctx, const ExpertsConfig& config, const DownArgs& args);

}  // namespace tandem::cuda
