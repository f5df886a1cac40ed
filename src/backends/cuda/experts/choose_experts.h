// choose_experts.h — which kernels compute the routed experts, and how they are cut. No choice
// changes a result (gemm/layout.h).
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/gemm/choose_linear.h"

namespace tandem::cuda {

struct ExpertsDesc {
  WeightFormat gate_up = WeightFormat::kBF16;
  WeightFormat down = WeightFormat::kBF16;
  std::int64_t experts = 0;
  std::int64_t tokens = 0;
  std::int64_t slots = 0;  // experts a token
  std::int64_t dim = 0;
  std::int64_t width = 0;
};

struct ExpertsConfig {
  bool stream = false;
  bool ring = false;  // the decode path of FP4: ring_gate_up and ring_down instead of the plans
  RingPlan ring_gate_up;
  RingPlan ring_down;
  StreamPlan gate_up;  // of the decode path
  StreamPlan down;
  int variant = 0;         // of the path for many rows: an index of kExpertTiles
  int chunk = 0;           // most tokens of a work item
  std::int64_t items = 0;  // work items at most, however tokens are spread over experts
};

/// Blocks of 16 outputs a warp of the decode path computes of gate and up: one of each.
inline constexpr int kGateUpBlocks = 2;

/// nullopt: out of the kernels' range (too many work items, or a stage that does not fit into
/// shared memory).
[[nodiscard]] std::optional<ExpertsConfig> choose_experts(const ExpertsDesc& desc,
                                                          const DeviceInfo& info);

}  // namespace tandem::cuda
