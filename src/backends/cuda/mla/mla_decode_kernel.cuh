// mla_decode_kernel.cuh — the Hopper kernel of absorbed MLA.   Contract: ops/mla.h. The law:
// mla_decode.h
// Math      s = scale q . row; p = exp(s - max); sums of p and of p c per row, head and split
// Schedule  An item is (group of rows of a sequence, split); an SM's CTA, or a pair of CTAs with
//           half of the item's (row, head) columns each, walks over its items. One warpgroup loads
//           (mla_decode_load.cuh), two multiply (mla_decode_math.cuh), through a ring of key tiles.
// Traffic   K3, bf16, a tile of 64 keys: 72 KiB from memory, once for up to 96 columns. Shared
//           memory for 48 columns: 1,008 clocks of reads for the scores, 900 for the sums (tensor
//           cores: 1,630 clocks), beside some 600 of softmax and barriers. 16 columns: 720 and 640.
// Barriers  full[stage]: a tile has landed; empty[stage]: every math warp (of both CTAs, where they
//           copy for each other) has used it.
// Launch    grid depends on shapes only; graph-safe. wgmma exists on capability 9.0 alone: for
//           other GPUs the kernel is empty, and the host does not choose it there.
#pragma once

#include <cmath>
#include <type_traits>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mla/mla_decode_launch.h"
#include "backends/cuda/mla/mla_decode_load.cuh"
#include "backends/cuda/mla/mla_decode_math.cuh"

namespace tandem::cuda {

template <LatentFormat kRows>
using DecodeElement = std::conditional_t<kRows == LatentFormat::kFp8, __half, __nv_bfloat16>;

/// Registers of a loading and of a multiplying thread: together what the launch gives.
template <LatentFormat kRows>
inline constexpr int kLoadRegisters = kRows == LatentFormat::kBF16 ? 40 : 120;
template <LatentFormat kRows>
inline constexpr int kMathRegisters = kRows == LatentFormat::kBF16 ? 232 : 192;

template <bool kPair>
__device__ __forceinline__ DecodeBlock start_block(const DecodeArgs& x, int columns) {
  char* const unaligned = dynamic_smem<char>();
  char* const shared = unaligned + (0U - ptx::shared_address(unaligned)) % 1024;
  constexpr int kCtas = kPair ? 2 : 1;
  DecodeBlock block{x,
                    DecodeShared(columns, x.stages),
                    shared,
                    static_cast<int>(blockIdx.x) % kCtas,
                    static_cast<int>(blockIdx.x) / kCtas,
                    static_cast<int>(gridDim.x) / kCtas,
                    0};
  DecodePlan& plan = *block.array<DecodePlan>(block.at.plan);
  plan.build(x);
  block.num_items = plan.first_item[x.num_rows];
  return block;
}

/// Rows that see nothing, in turn: zeros.
inline __device__ void fill_empty_rows(const DecodeArgs& x, const DecodePlan& plan) {
  for (int row = static_cast<int>(blockIdx.x); row < x.num_rows;
       row += static_cast<int>(gridDim.x)) {
    if (plan.visible[row] > 0) {
      continue;
    }
    const int t = x.first_row + row;
    for (int head = 0; head < x.num_heads; ++head) {
      for (int d = static_cast<int>(threadIdx.x); d < kDecodeLatent; d += kDecodeThreads) {
        x.o.row(t, head)[d] = 0.0F;
      }
      if (x.lse.data != nullptr && threadIdx.x == 0) {
        x.lse.row(t)[head] = -INFINITY;
      }
    }
  }
}

template <bool kCluster>
__device__ __forceinline__ void start_barriers(const DecodeBlock& block) {
  constexpr unsigned kMathWarps = kDecodeMathThreads / kWarp;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < block.at.stages; ++stage) {
      ptx::mbarrier_init(block.full(stage), 1);
      ptx::mbarrier_init(block.empty(stage), kCluster ? 2 * kMathWarps : kMathWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if constexpr (kCluster) {  // the other CTA's as well
    ptx::cluster_arrive_release();
    ptx::cluster_wait();
  }
}

template <LatentFormat kRows, bool kPair>
__device__ __forceinline__ void load_tiles(const DecodeBlock& block) {
  if constexpr (kRows == LatentFormat::kBF16) {
    load_tiles_bf16<kPair>(block);
  } else if constexpr (kRows == LatentFormat::kFp8) {
    load_tiles_converted<E4m3Units>(block);
  } else {
    load_tiles_converted<F32Units>(block);
  }
}

template <LatentFormat kRows, int kColumns, bool kPair>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    attend_splits(const __grid_constant__ DecodeArgs x) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kCluster = kPair && kRows == LatentFormat::kBF16;
  const DecodeBlock block = start_block<kPair>(x, kColumns);
  fill_empty_rows(x, block.plan());
  if (block.first >= block.num_items) {
    return;  // both CTAs of a pair
  }
  start_barriers<kCluster>(block);
  if (threadIdx.x >= kDecodeMathThreads) {
    ptx::give_registers<kLoadRegisters<kRows>>();
    load_tiles<kRows, kPair>(block);
  } else {
    ptx::take_registers<kMathRegisters<kRows>>();
    multiply_tiles<DecodeElement<kRows>, kColumns, kCluster>(block);
  }
  if constexpr (kCluster) {
    // The other CTA may still copy into this one, or arrive at its barriers.
    __syncwarp();
    ptx::cluster_arrive_release();
    ptx::cluster_wait();
  }
#endif
}

template <LatentFormat kRows>
DecodeKernel decode_kernel(const DecodeConfig& config) {
  if (config.ctas == 2) {
    return config.columns == 32 ? attend_splits<kRows, 32, true> : attend_splits<kRows, 48, true>;
  }
  switch (config.columns) {
    case 16:
      return attend_splits<kRows, 16, false>;
    case 32:
      return attend_splits<kRows, 32, false>;
    default:
      return attend_splits<kRows, 48, false>;
  }
}

}  // namespace tandem::cuda
