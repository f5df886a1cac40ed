#include "backends/cuda/mla/mla_decode.h"

namespace tandem::cuda {
namespace {

constexpr int kColumnStep = 16;
constexpr int kLeastStages = 2;  // a tile is handed over while the next one is fetched
constexpr int kMostStages = 4;

constexpr int padded(int columns) {
  return (columns + kColumnStep - 1) / kColumnStep * kColumnStep;
}

}  // namespace

std::optional<DecodeConfig> choose_decode(const DecodeDesc& desc, const DeviceInfo& info) {
  constexpr int kPairColumns = 2 * kDecodeColumns;
  if (desc.heads < 1 || desc.heads > kPairColumns || desc.rows < 1 || desc.sequences < 1) {
    return std::nullopt;
  }
  const std::int64_t mean_rows = (desc.rows + desc.sequences - 1) / desc.sequences;
  DecodeConfig config;
  config.group_rows =
      static_cast<int>(std::clamp<std::int64_t>(mean_rows, 1, kPairColumns / desc.heads));
  const int columns = config.group_rows * desc.heads;
  config.ctas = columns <= kDecodeColumns ? 1 : 2;
  config.columns = padded((columns + config.ctas - 1) / config.ctas);
  config.stages = kMostStages;
  while (config.stages >= kLeastStages &&
         DecodeShared(config.columns, config.stages).total > info.smem_per_block) {
    --config.stages;
  }
  config.smem_bytes = DecodeShared(config.columns, config.stages).total;
  return config.stages >= kLeastStages ? std::optional(config) : std::nullopt;
}

}  // namespace tandem::cuda
