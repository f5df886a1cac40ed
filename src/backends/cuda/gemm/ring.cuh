// ring.cuh — the decode path of products with FP4 weights: every warp has a ring of segments in
// shared memory that the bulk copy engine fills, so that memory is busy while warps decode.
// Schedule  A stage is one segment (layout.h) of kBlocks blocks of 16 outputs. A warp copies a
// stage
//           to registers, lets the engine refill it, then decodes and multiplies: all its stages
//           are under way most of the time. Nobody else touches a warp's ring.
// Numerics  those of stream.cuh: a segment is one chain of mma from zero.
#pragma once

#include "backends/cuda/gemm/dequant.cuh"
#include "backends/cuda/gemm/multiply_tile.cuh"
#include "backends/cuda/gemm/plan.h"
#include "backends/cuda/ptx/bulk_copy.cuh"

namespace tandem::cuda {

/// A stage: of each block, a segment's elements, then its scales.
template <WeightFormat F, int kBlocks>
struct RingStage {
  static constexpr int kTiles = static_cast<int>(segment_inputs(F) / kTileInputs);
  static constexpr int kElements = kTiles * static_cast<int>(tile_bytes(F));
  static constexpr int kBlockBytes = kElements + kTiles * static_cast<int>(tile_scale_bytes(F));
  static constexpr int kBytes = kBlocks * kBlockBytes;
};

/// What one lane fetches of every segment: of a block, elements or scales.
struct RingSource {
  const std::uint8_t* from = nullptr;  // its first tile
  unsigned step = 0;                   // bytes a tile
  unsigned to = 0;                     // in a stage

  /// Elements (even lanes) and scales (odd lanes) of block lane / 2.
  template <WeightFormat F, typename Stage>
  static __device__ __forceinline__ RingSource of_lane(int lane) {
    const bool scales = lane % 2 == 1;
    return {nullptr, static_cast<unsigned>(scales ? tile_scale_bytes(F) : tile_bytes(F)),
            static_cast<unsigned>(lane / 2 * Stage::kBlockBytes + (scales ? Stage::kElements : 0))};
  }
  /// `from` in a packed weight, for such a lane.
  __device__ __forceinline__ std::int64_t place(const TensorShape& shape, int block,
                                                int lane) const {
    return (lane % 2 == 1 ? shape.scales_offset : 0) +
           std::int64_t{min(block, shape.row_blocks - 1)} * shape.k_tiles * step;
  }
};

/// The calling warp's ring.
template <typename Stage>
class Ring {
 public:
  /// `smem`: ring_barrier_bytes(warps, stages), then warps * stages stages; aligned to 128.
  __device__ __forceinline__ Ring(std::uint8_t* smem, int warps, int stages) : stages_(stages) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    full_ = reinterpret_cast<std::uint64_t*>(smem) + warp * stages;
    bytes_ = smem + ring_barrier_bytes(warps, stages) + warp * stages * Stage::kBytes;
    if (threadIdx.x % 32 == 0) {
#pragma unroll 1
      for (int i = 0; i < stages; ++i) {
        ptx::mbarrier_init(full_ + i, 1);
      }
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
  }

  /// Begins to fill the next stage with `tiles` tiles from `tile` on; lanes below `copies` have a
  /// source. All lanes have read what the stage held (__syncwarp). `sum`: of all sources' bytes a
  /// tile.
  __device__ __forceinline__ void put(const RingSource& source, int copies, unsigned sum, int tile,
                                      int tiles) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane == 0) {
      ptx::mbarrier_expect(full_ + put_, sum * static_cast<unsigned>(tiles));
    }
    if (lane < copies) {
      ptx::bulk_copy(bytes_ + put_ * Stage::kBytes + source.to,
                     source.from + static_cast<unsigned>(tile) * source.step,
                     static_cast<unsigned>(tiles) * source.step, full_ + put_);
    }
    put_ = put_ + 1 == stages_ ? 0 : put_ + 1;
  }
  /// The oldest stage, once it is full. Then next().
  __device__ __forceinline__ const std::uint8_t* wait() {
    ptx::mbarrier_wait(full_ + get_, parity_);
    return bytes_ + get_ * Stage::kBytes;
  }
  __device__ __forceinline__ void next() {
    get_ = get_ + 1 == stages_ ? 0 : get_ + 1;
    parity_ ^= get_ == 0 ? 1U : 0U;
  }

 private:
  std::uint64_t* full_;
  std::uint8_t* bytes_;
  int stages_;
  int put_ = 0;
  int get_ = 0;
  unsigned parity_ = 0;
};

/// A stage in registers. Lane t of each four has the scales of tile t.
template <WeightFormat F, int kBlocks>
struct RingTiles {
  static constexpr int kTiles = RingStage<F, kBlocks>::kTiles;
  static_assert(kTiles <= 4);
  RawTile<F> raw[kTiles][kBlocks];
  RawScales<F> codes[kBlocks];

  __device__ __forceinline__ void load(const std::uint8_t* stage, int lane) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      const std::uint8_t* block = stage + m * RingStage<F, kBlocks>::kBlockBytes;
      const std::uint8_t* scales = block + RingStage<F, kBlocks>::kElements +
                                   lane % 4 * static_cast<int>(tile_scale_bytes(F));
      if constexpr (F == WeightFormat::kNvFp4) {
        const uint2 both = *reinterpret_cast<const uint2*>(scales + lane / 4 * 8);
        codes[m].words[0] = both.x;
        codes[m].words[1] = both.y;
      } else {
        codes[m].words[0] = *reinterpret_cast<const std::uint32_t*>(scales + lane / 4 * 4);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        raw[i][m].words[0] = *reinterpret_cast<const uint4*>(block + i * tile_bytes(F) + lane * 16);
      }
    }
  }
};

/// acc += the product with a segment of `tiles` tiles; kWhole: of all there can be. `inputs`: the
/// lane's part of its token's row as stage_ring_inputs leaves it, at the segment.
template <WeightFormat F, int kBlocks, bool kWhole>
__device__ __forceinline__ void multiply_ring_tiles(float (&acc)[kBlocks][4],
                                                    const RingTiles<F, kBlocks>& segment,
                                                    const std::uint8_t* inputs, int tiles) {
  TileScales scales[kBlocks];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    scales[m] = decode_scales(segment.codes[m]);
  }
#pragma unroll
  for (int i = 0; i < RingTiles<F, kBlocks>::kTiles; ++i) {
    if (!kWhole && i >= tiles) {
      return;
    }
    const uint4 low = *reinterpret_cast<const uint4*>(inputs + i * 128);
    const uint4 high = *reinterpret_cast<const uint4*>(inputs + i * 128 + 64);
    const std::uint32_t b[kStepsPerTile][2] = {
        {low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
    multiply_tile<F>(acc, segment.raw[i], scales, i, b);
  }
}

/// Rows of bf16 activations as multiply_ring_tiles wants them: of 32 inputs, lane t's two B
/// fragments are 16 adjacent bytes. Copies `count` rows to shared memory; all threads of the CTA
/// call. `row(i, t)`: F32Inputs or Bf16Inputs of row i as lane t of four has it.
template <typename RowOf>
__device__ __forceinline__ void stage_ring_inputs(std::uint8_t* to, int count, int k_tiles,
                                                  const RowOf& row) {
  const int chunks = k_tiles * 8;
  for (int i = 0; i < count; ++i) {
    for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks;
         chunk += static_cast<int>(blockDim.x)) {
      const auto inputs = row(i, chunk % 4);
      std::uint32_t first[2];
      std::uint32_t second[2];
      inputs.load(first, chunk / 4 * 32);
      inputs.load(second, chunk / 4 * 32 + 16);
      *reinterpret_cast<uint4*>(to + i * ring_row_bytes(k_tiles) + chunk * 16) =
          make_uint4(first[0], first[1], second[0], second[1]);
    }
  }
}

}  // namespace tandem::cuda
