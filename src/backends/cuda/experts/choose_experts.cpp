#include "backends/cuda/experts/choose_experts.h"

#include <algorithm>

namespace tandem::cuda {
namespace {

/// Tokens an expert, on average, from which a tile of many tokens pays: below, most work items have
/// few tokens, and the decode path reads weights faster.
constexpr std::int64_t kStreamPairs = 4;
/// And from which the larger tile does.
constexpr std::int64_t kSmallTileTokens = 32;
constexpr std::int64_t kMaxItems = 65535;  // gridDim.y

/// An expert with tokens has one item that may be partly filled; all others are full.
std::int64_t most_items(const ExpertsDesc& desc, std::int64_t chunk) {
  const std::int64_t pairs = desc.tokens * desc.slots;
  return std::min(desc.experts, pairs) + pairs / chunk;
}

bool is_fp4(WeightFormat format) {
  return format == WeightFormat::kMxFp4 || format == WeightFormat::kNvFp4;
}

constexpr std::int64_t kSmemOfSystem = 1024;              // of every CTA, beside its own
constexpr std::int64_t kSmemOfCta = kSmemOfSystem + 128;  // and what kernels declare themselves
constexpr int kRingWarps = kRingThreads / 32;
constexpr int kRingStages = 4;  // of a warp, at most
/// Tokens of an item up to which CTAs have half of the warps, so that two share an SM: faster as
/// long as both fit (K3: 194 us, not 218, at two tokens, 349, not 395, at four). From five on,
/// K3's gate_up leaves no room for the second one, and 8 warps alone are slower: 893 us, not 737,
/// at eight. More figures: ring_kernels.cuh.
constexpr int kTwoCtaTokens = 4;

/// Bytes of a stage that holds a segment of `blocks` blocks.
std::int64_t stage_bytes(WeightFormat format, int blocks) {
  return segment_inputs(format) / kTileInputs * blocks *
         (tile_bytes(format) + tile_scale_bytes(format));
}

/// As many stages as there is room for with `ctas` CTAs on an SM; 0: not even one.
int choose_stages(std::int64_t fixed_bytes, std::int64_t warp_stage_bytes, int most, int ctas,
                  const DeviceInfo& info) {
  const std::int64_t room = (info.smem_per_block + kSmemOfSystem) / ctas - kSmemOfCta - fixed_bytes;
  return static_cast<int>(std::clamp<std::int64_t>(room / warp_stage_bytes, 0, most));
}

/// Warps that share `segments` with the least idle time in the last turn.
int choose_ring_warps(int segments, int most) {
  const int turns = (segments + most - 1) / most;
  return std::max(1, (segments + turns - 1) / turns);
}

/// `units` sums of `blocks` blocks of 16 outputs.
std::optional<RingPlan> plan_ring(WeightFormat format, const TensorShape& shape, int blocks,
                                  std::int64_t units, std::int64_t tokens, const DeviceInfo& info) {
  RingPlan plan;
  plan.tokens = static_cast<int>(std::min(tokens, kMaxStreamRows));
  plan.warps =
      choose_ring_warps(shape.segments, plan.tokens <= kTwoCtaTokens ? kRingWarps / 2 : kRingWarps);
  const std::int64_t turns = (shape.segments + plan.warps - 1) / plan.warps;
  const std::int64_t stage = stage_bytes(format, blocks) * plan.warps;
  const std::int64_t inputs_and_sums =
      std::int64_t{plan.tokens} * ring_row_bytes(shape.k_tiles) +
      std::int64_t{2} * blocks * shape.segments * plan.token_pairs() * kRingSumBytes;
  for (int ctas = std::max(1, kRingWarps / plan.warps); ctas > 0; ctas /= 2) {
    plan.ctas = std::clamp<std::int64_t>(units, 1, std::int64_t{ctas} * info.num_sms);
    const std::int64_t tasks = (units + plan.ctas - 1) / plan.ctas * turns;
    const int most = static_cast<int>(std::min<std::int64_t>(tasks, kRingStages));
    const std::int64_t fixed = ring_barrier_bytes(plan.warps, most) + inputs_and_sums;
    plan.stages = choose_stages(fixed, stage, most, ctas, info);
    if (plan.stages >= std::min(2, most)) {
      plan.smem_bytes = fixed + stage * plan.stages;
      return plan;
    }
  }
  return std::nullopt;
}

/// The decode path by rings, where formats and sizes allow it.
void choose_ring(ExpertsConfig& config, const ExpertsDesc& desc, const DeviceInfo& info) {
  if (!is_fp4(desc.gate_up) || !is_fp4(desc.down)) {
    return;
  }
  const TensorShape gate_up_shape = tensor_shape(desc.gate_up, desc.width, desc.dim);
  const TensorShape down_shape = tensor_shape(desc.down, desc.dim, desc.width);
  const auto gate_up = plan_ring(desc.gate_up, gate_up_shape, kGateUpBlocks,
                                 gate_up_shape.row_blocks * config.items, desc.tokens, info);
  const int blocks = stream_blocks(desc.down);
  const auto down =
      plan_ring(desc.down, down_shape, blocks,
                (down_shape.row_blocks + blocks - 1) / blocks * config.items, desc.tokens, info);
  config.ring = gate_up && down;
  if (config.ring) {
    config.ring_gate_up = *gate_up;
    config.ring_down = *down;
  }
}

}  // namespace

std::optional<ExpertsConfig> choose_experts(const ExpertsDesc& desc, const DeviceInfo& info) {
  ExpertsConfig config;
  const std::int64_t pairs = desc.tokens * desc.slots;
  if (pairs <= kStreamPairs * desc.experts || desc.tokens <= kMaxStreamRows) {
    const std::int64_t busy = std::min(desc.experts, pairs);
    const std::int64_t tokens = std::min(desc.tokens, kMaxStreamRows);
    const auto gate_up =
        plan_stream({.shape = tensor_shape(desc.gate_up, desc.width, desc.dim),
                     .blocks = kGateUpBlocks / 2,  // of the outputs; sums take twice the room
                     .outer = busy,
                     .tokens = tokens},
                    info);
    const auto down = plan_stream({.shape = tensor_shape(desc.down, desc.dim, desc.width),
                                   .blocks = stream_blocks(desc.down),
                                   .outer = busy,
                                   .tokens = tokens},
                                  info);
    if (gate_up && down && gate_up->smem_bytes(kGateUpBlocks) <= info.smem_per_block) {
      config.stream = true;
      config.gate_up = *gate_up;
      config.down = *down;
      config.chunk = static_cast<int>(std::min(desc.tokens, kMaxStreamRows));
    }
  }
  if (!config.stream) {
    config.variant = pairs <= kSmallTileTokens * desc.experts ? 0 : 1;
    const TileVariant& v = kExpertTiles[config.variant];
    config.chunk = v.tokens();
    if (v.smem_bytes(desc.gate_up, 0) > info.smem_per_block ||
        v.smem_bytes(desc.down, 0) > info.smem_per_block) {
      return std::nullopt;
    }
  }
  config.items = desc.tokens == 1 ? desc.slots : most_items(desc, config.chunk);
  if (config.stream) {
    choose_ring(config, desc, info);
  }
  return config.items <= kMaxItems ? std::optional(config) : std::nullopt;
}

}  // namespace tandem::cuda
