#include "backends/cuda/gemm/choose_linear.h"

#include <algorithm>

namespace tandem::cuda {
namespace {

constexpr int kMaxStreamWarps = kStreamThreads / 32;
constexpr int kMaxCluster = 8;  // the most that every GPU with clusters allows

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Warps that share `segments` with the least idle time in the last round; at least 4 if there is
/// work for them, more where it costs nothing.
int choose_k_warps(int segments) {
  int best = std::clamp(segments, 1, kMaxStreamWarps);
  int best_turns = static_cast<int>(ceil_div(segments, best)) * best;
  for (int warps = best - 1; warps >= 4; --warps) {
    const int turns = static_cast<int>(ceil_div(segments, warps)) * warps;
    if (turns < best_turns) {
      best = warps;
      best_turns = turns;
    }
  }
  return best;
}

/// Of two tiles for many rows, the larger one needs fewer bytes a product and the smaller one
/// leaves fewer SMs idle. Unit: the time of an SM for kLinearTiles[2]; its rate per output is
/// lower.
int choose_large_variant(const LinearDesc& desc, const DeviceInfo& info) {
  constexpr int kSmall = 2;
  constexpr int kLarge = 3;
  const auto waves = [&](const TileVariant& v) {
    return ceil_div(
        ceil_div(desc.out, v.outputs()) * ceil_div(desc.tokens, v.tokens()) * desc.heads,
        info.num_sms);
  };
  const double small = 1.3 * static_cast<double>(waves(kLinearTiles[kSmall]));
  const double large = 4.0 * static_cast<double>(waves(kLinearTiles[kLarge]));
  const bool fits = kLinearTiles[kLarge].smem_bytes(desc.format, 0) <= info.smem_per_block;
  return fits && large <= small ? kLarge : kSmall;
}

int choose_variant(const LinearDesc& desc, const DeviceInfo& info) {
  for (int i = 0; i < 3; ++i) {
    if (desc.tokens <= kLinearTiles[i].tokens()) {
      return i;
    }
  }
  return choose_large_variant(desc, info);
}

LinearConfig choose_tile(const LinearDesc& desc, const DeviceInfo& info) {
  LinearConfig config;
  config.variant = choose_variant(desc, info);
  const TileVariant& v = kLinearTiles[config.variant];
  const int segments = tensor_shape(desc.format, desc.out, desc.in).segments;
  const std::int64_t tokens = ceil_div(desc.tokens, v.tokens());
  config.grid_y = ceil_div(desc.out, v.outputs());
  config.threads = v.threads();

  // A tile is shared when that fills the GPU and its segments' sums fit beside the stages.
  const std::int64_t tiles = tokens * config.grid_y * desc.heads;
  const auto slots = [&](int cluster) { return static_cast<int>(ceil_div(segments, cluster)); };
  const auto fits = [&](int cluster) {
    return v.smem_bytes(desc.format, slots(cluster)) <= info.smem_per_block;
  };
  int cluster = 1;
  while (
      cluster < kMaxCluster && segments >= 2 * cluster &&
      (tiles * cluster * 4 < std::int64_t{3} * info.num_sms || (cluster > 1 && !fits(cluster)))) {
    cluster *= 2;
  }
  if (cluster > 1 && fits(cluster)) {
    config.cluster = cluster;
    config.slots = slots(cluster);
  }
  config.smem_bytes = v.smem_bytes(desc.format, config.slots);
  config.grid_x = tokens * config.cluster;
  return config;
}

}  // namespace

std::optional<StreamPlan> plan_stream(const StreamDesc& desc, const DeviceInfo& info) {
  const auto groups = [&](int row_warps) {
    return ceil_div(desc.shape.row_blocks, std::int64_t{desc.blocks} * row_warps) * desc.outer;
  };
  StreamPlan plan;
  const auto fits = [&] { return plan.smem_bytes(desc.blocks) <= info.smem_per_block; };
  const auto set_cluster = [&](int cluster) {
    plan.cluster = cluster;
    plan.slots = std::max(1, static_cast<int>(ceil_div(desc.shape.segments, cluster)));
  };
  set_cluster(1);
  while (plan.cluster < desc.max_cluster && desc.shape.segments >= 2 * plan.cluster &&
         (groups(1) * plan.cluster * 2 < std::int64_t{3} * info.num_sms || !fits())) {
    set_cluster(plan.cluster * 2);
  }
  plan.k_warps = choose_k_warps(plan.slots);
  // Short sums: several row blocks a CTA, while there are CTAs enough.
  while (plan.row_warps * 2 * plan.k_warps <= kMaxStreamWarps &&
         groups(plan.row_warps * 2) * plan.cluster >= std::int64_t{4} * info.num_sms) {
    plan.row_warps *= 2;
  }
  return fits() ? std::optional(plan) : std::nullopt;
}

namespace {

/// All `layers` in one launch, each `heads` times.
std::optional<LinearConfig> choose_stream(WeightFormat format, std::span<const TensorShape> layers,
                                          std::int64_t heads, const DeviceInfo& info) {
  const std::int64_t blocks = stream_blocks(format);
  // To the plan they are one layer with all outputs and the longest sums.
  StreamDesc stream{
      .shape = {}, .blocks = stream_blocks(format), .outer = heads, .max_cluster = kMaxCluster};
  for (const TensorShape& layer : layers) {
    stream.shape.row_blocks += static_cast<int>(ceil_div(layer.row_blocks, blocks) * blocks);
    stream.shape.segments = std::max(stream.shape.segments, layer.segments);
  }
  const auto plan = plan_stream(stream, info);
  if (!plan) {
    return std::nullopt;
  }
  LinearConfig config;
  config.stream = true;
  config.plan = *plan;
  for (const TensorShape& layer : layers) {
    config.grid_x += plan->groups(layer.row_blocks, stream.blocks) * plan->cluster;
  }
  config.grid_y = heads;
  config.smem_bytes = plan->smem_bytes(stream.blocks);
  config.threads = plan->threads();
  return config;
}

}  // namespace

std::optional<LinearConfig> choose_linear_group(WeightFormat format,
                                                std::span<const TensorShape> layers,
                                                const DeviceInfo& info) {
  return choose_stream(format, layers, 1, info);
}

std::optional<LinearConfig> choose_linear(const LinearDesc& desc, const DeviceInfo& info) {
  if (desc.tokens <= kMaxStreamRows) {
    const TensorShape shape = tensor_shape(desc.format, desc.out, desc.in);
    if (auto config = choose_stream(desc.format, {&shape, 1}, desc.heads, info)) {
      return config;
    }
  }
  const LinearConfig config = choose_tile(desc, info);
  return config.smem_bytes <= info.smem_per_block ? std::optional(config) : std::nullopt;
}

}  // namespace tandem::cuda
