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

/// For measuring only: which of the decode path's kernels run, and how they are cut.
struct ExpertsTuning {
  bool ring = true;     // FP4: ring.cuh, not stream.cuh
  bool fused = true;    // one token: down and combine in one kernel
  int warps = 16;       // of a CTA, at most
  int fused_warps = 8;  // the same of down and combine
  int stages = 4;       // at most
  unsigned parts = 7;   // 1: work and gate_up, 2: down, 4: combine
};
inline ExpertsTuning experts_tuning;

struct ExpertsConfig {
  bool stream = false;
  bool ring = false;   // the decode path of FP4: ring_gate_up and ring_down instead of the plans
  bool fused = false;  // ring_down is of down and combine in one kernel (one token)
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
