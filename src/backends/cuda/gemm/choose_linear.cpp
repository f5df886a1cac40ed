#include "backends/cuda/gemm/choose_linear.h"

#include <algorithm>

namespace tandem::cuda {
namespace {

constexpr int kMaxStreamWarps = kStreamThreads / 32;
constexpr int kMaxCluster = 8;  // the most that every GPU with clusters allows

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Up to `most` warps that share `segments` with the least idle time in the last round; at least 4
/// if there is work for them, more where it costs nothing.
int choose_k_warps(int segments, int most) {
  int best = std::clamp(segments, 1, most);
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
  StreamPlan plan;
  plan.segments = std::max(1, desc.shape.segments);
  plan.tokens = static_cast<int>(ceil_div(desc.tokens, 2)) * 2;
  plan.row_warps = desc.gated ? 2 : 1;
  const auto ctas = [&](int row_warps) {
    return ceil_div(desc.shape.row_blocks, std::int64_t{desc.blocks} * row_warps) * desc.outer *
           plan.cluster;
  };
  const auto fits = [&] { return plan.smem_bytes(desc.blocks) <= info.smem_per_block; };
  // Warps of a CTA meet sooner than CTAs do: the inputs are only split if they are many.
  while (plan.cluster < desc.max_cluster && plan.segments >= 2 * plan.cluster &&
         (!fits() ||
          (plan.segments > kMaxStreamWarps && ctas(1) * 2 < std::int64_t{3} * info.num_sms))) {
    plan.cluster *= 2;
  }
  const int warps = kMaxStreamWarps / plan.row_warps;
  plan.k_warps = choose_k_warps(static_cast<int>(ceil_div(plan.segments, plan.cluster)), warps);
  // Short sums: several row blocks a CTA, while there are CTAs enough.
  while (plan.row_warps * 2 * plan.k_warps <= kMaxStreamWarps &&
         ctas(plan.row_warps * 2) >= std::int64_t{4} * info.num_sms) {
    plan.row_warps *= 2;
  }
  return fits() ? std::optional(plan) : std::nullopt;
}

namespace {

LinearConfig stream_config(const StreamPlan& plan, int blocks) {
  LinearConfig config;
  config.stream = true;
  config.plan = plan;
  config.smem_bytes = plan.smem_bytes(blocks);
  config.threads = plan.threads();
  return config;
}

}  // namespace

std::optional<LinearConfig> choose_linear_group(const LinearGroupDesc& desc,
                                                const DeviceInfo& info) {
  const int blocks = stream_blocks(desc.format);
  // To the plan they are one layer with all outputs and the longest sums.
  StreamDesc stream{.shape = {},
                    .blocks = blocks,
                    .tokens = desc.tokens,
                    .max_cluster = kMaxCluster,
                    .gated = desc.gated};
  for (const TensorShape& layer : desc.layers) {
    stream.shape.row_blocks += static_cast<int>(ceil_div(layer.row_blocks, blocks) * blocks);
    stream.shape.segments = std::max(stream.shape.segments, layer.segments);
  }
  const auto plan = plan_stream(stream, info);
  return plan ? std::optional(stream_config(*plan, blocks)) : std::nullopt;
}

namespace {

std::optional<LinearConfig> choose_stream(const LinearDesc& desc, const DeviceInfo& info) {
  TensorShape shape = tensor_shape(desc.format, desc.out, desc.in);
  const int blocks = stream_blocks(desc.format);
  if (desc.second_in > 0) {
    shape.segments += tensor_shape(desc.format, desc.out, desc.second_in).segments;
  }
  const auto plan = plan_stream({.shape = shape,
                                 .blocks = blocks,
                                 .outer = desc.heads,
                                 .tokens = desc.tokens,
                                 .max_cluster = kMaxCluster},
                                info);
  if (!plan) {
    return std::nullopt;
  }
  LinearConfig config = stream_config(*plan, blocks);
  config.grid_x = plan->groups(shape.row_blocks, blocks) * plan->cluster;
  config.grid_y = desc.heads;
  return config;
}

}  // namespace

std::optional<LinearConfig> choose_linear(const LinearDesc& desc, const DeviceInfo& info) {
  if (desc.tokens <= kMaxStreamRows) {
    if (auto config = choose_stream(desc, info)) {
      return config;
    }
  }
  const LinearConfig config = choose_tile(desc, info);
  return config.smem_bytes <= info.smem_per_block ? std::optional(config) : std::nullopt;
}

}  // namespace tandem::cuda
