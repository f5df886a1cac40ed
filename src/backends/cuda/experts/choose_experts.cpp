#include "backends/cuda/experts/choose_experts.h"

#include <algorithm>

namespace tandem::cuda {
namespace {

/// Tokens an expert, on average, from which a tile of many tokens pays: below, most work items have
/// few tokens, and the decode path reads weights faster.
constexpr std::int64_t kStreamTokens = 4;
/// And from which the larger tile does.
constexpr std::int64_t kSmallTileTokens = 32;
constexpr std::int64_t kMaxItems = 65535;  // gridDim.y

/// An expert with tokens has one item that may be partly filled; all others are full.
std::int64_t most_items(const ExpertsDesc& desc, std::int64_t chunk) {
  const std::int64_t pairs = desc.tokens * desc.slots;
  return std::min(desc.experts, pairs) + pairs / chunk;
}

}  // namespace

std::optional<ExpertsConfig> choose_experts(const ExpertsDesc& desc, const DeviceInfo& info) {
  ExpertsConfig config;
  const std::int64_t pairs = desc.tokens * desc.slots;
  if (pairs <= kStreamTokens * desc.experts || desc.tokens <= kMaxStreamRows) {
    const std::int64_t busy = std::min(desc.experts, pairs);
    const auto gate_up =
        plan_stream({.shape = tensor_shape(desc.gate_up, desc.width, desc.dim),
                     .blocks = kGateUpBlocks / 2,  // of the outputs; sums take twice the room
                     .outer = busy},
                    info);
    const auto down = plan_stream({.shape = tensor_shape(desc.down, desc.dim, desc.width),
                                   .blocks = stream_blocks(desc.down),
                                   .outer = busy},
                                  info);
    if (gate_up && down && gate_up->smem_bytes(kGateUpBlocks) <= info.smem_per_block) {
      config.stream = true;
      config.gate_up = *gate_up;
      config.down = *down;
      config.chunk = static_cast<int>(kMaxStreamRows);
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
  config.items = most_items(desc, config.chunk);
  return config.items <= kMaxItems ? std::optional(config) : std::nullopt;
}

}  // namespace tandem::cuda
