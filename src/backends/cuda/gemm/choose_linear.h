// choose_linear.h — which kernel computes a linear layer, and how it is cut. No choice changes a
// result (layout.h); it is for speed alone.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "backends/cuda/gemm/plan.h"
#include "backends/cuda/runtime/device_info.h"

namespace tandem::cuda {

/// Rows up to which weights are streamed through registers (stream.cuh).
inline constexpr std::int64_t kMaxStreamRows = 8;

/// How to stream `shape` in `outer` copies (heads, experts), `blocks` blocks of 16 outputs a warp;
/// inputs may be split over a cluster of up to `max_cluster` CTAs. nullopt: the segments' sums do
/// not fit into shared memory.
struct StreamDesc {
  TensorShape shape;
  int blocks = 1;
  std::int64_t outer = 1;
  std::int64_t tokens = 8;
  int max_cluster = 1;
  bool gated = false;  // row blocks come in pairs, half the warps take the second ones
};
[[nodiscard]] std::optional<StreamPlan> plan_stream(const StreamDesc& desc, const DeviceInfo& info);

struct LinearDesc {
  WeightFormat format = WeightFormat::kBF16;
  std::int64_t out = 0;
  std::int64_t in = 0;
  std::int64_t tokens = 0;
  std::int64_t heads = 1;
  std::int64_t second_in = 0;  // inputs of a second product added to the first; decode path only
};

struct LinearConfig {
  bool stream = false;
  StreamPlan plan;  // of the decode path
  int variant = 0;  // of the path for many rows: an index of kLinearTiles ...
  int cluster = 1;  // ... how many CTAs share a tile, each with its part of the inputs ...
  int slots = 0;    // ... and the most segments one of them has; 0 when none is shared
  std::int64_t grid_x = 0;
  std::int64_t grid_y = 0;
  std::int64_t smem_bytes = 0;
  int threads = 0;
};

/// nullopt: out of the kernels' range (a stage does not fit into shared memory).
[[nodiscard]] std::optional<LinearConfig> choose_linear(const LinearDesc& desc,
                                                        const DeviceInfo& info);

/// Layers of one launch of the decode path, of at most kMaxStreamRows rows each.
struct LinearGroupDesc {
  WeightFormat format = WeightFormat::kBF16;
  std::int64_t tokens = 0;  // the most of a layer
  std::vector<TensorShape> layers;
  bool gated = false;  // some layers are pairs of this shape
};

/// One plan for all; grid_x is for the caller, who knows which are pairs. nullopt: the segments'
/// sums of one of them do not fit.
[[nodiscard]] std::optional<LinearConfig> choose_linear_group(const LinearGroupDesc& desc,
                                                              const DeviceInfo& info);

}  // namespace tandem::cuda
