// exact_linear_tiled.cu — exact_linear.cuh for the formats that are kept in tiles. For inference
// that must match the CPU bit for bit, so two shapes of tiles are enough.
#include "backends/cuda/gemm/exact_launch.h"
#include "backends/cuda/gemm/exact_linear.cuh"

namespace tandem::cuda {
namespace {

// Half as deep as SkinnyTile: a code and a scale an element wait in registers.
using FewRowsTile = Tile<8, 32, 128, 4, 1, 256, 1>;
using ManyRowsTile = Tile<64, 64, 32, 4, 4, 256, 1>;

}  // namespace

void launch_linear_tiled(const ExecCtx& ctx, const char* op, const LinearShape& shape,
                         std::span<const PackedWeight> weights) {
  switch (weights.front().format) {
    case WeightFormat::kF32:
      break;
    case WeightFormat::kBF16:
      return launch_linear_of<WeightFormat::kBF16, ManyRowsTile, FewRowsTile>(ctx, op, shape,
                                                                              weights);
    case WeightFormat::kMxFp4:
      return launch_linear_of<WeightFormat::kMxFp4, ManyRowsTile, FewRowsTile>(ctx, op, shape,
                                                                               weights);
    case WeightFormat::kNvFp4:
      return launch_linear_of<WeightFormat::kNvFp4, ManyRowsTile, FewRowsTile>(ctx, op, shape,
                                                                               weights);
    case WeightFormat::kFp8Block:
      return launch_linear_of<WeightFormat::kFp8Block, ManyRowsTile, FewRowsTile>(ctx, op, shape,
                                                                                  weights);
  }
  TDM_CHECK(false, "kF32 is not kept in tiles");
}

}  // namespace tandem::cuda
