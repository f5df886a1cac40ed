// exact_tile.cuh — a tile of a matrix product whose every element is one fused multiply-add chain
// over the reduction index in rising order, in fp32 (ops/gemm.h). Tiles of any shape give the same
// bits, so the launcher picks one by how many blocks it makes.
//
// A block computes kM x kN elements. Slabs of kDepth reduction indices pass through shared memory,
// the reduction index outermost; while one is multiplied, the next waits in registers as it is
// stored (codes and scales of packed weights become fp32 on their way into shared memory).
#pragma once

#include <cstdint>

#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {

/// How a thread's kPer elements of an axis of kExtent lie: pieces of up to 4 adjacent ones, so that
/// a piece is one load, and neighbouring threads' pieces adjacent.
template <int kExtent, int kPer>
struct Spread {
  static constexpr int kPiece = kPer < 4 ? kPer : 4;
  static constexpr int kPieces = kPer / kPiece;
  static constexpr int kThreads = kExtent / kPer;
  static_assert(kPer == 1 || kPer == 2 || kPer % 4 == 0);

  __device__ static int at(int thread, int i) {
    return i / kPiece * (kExtent / kPieces) + thread * kPiece + i % kPiece;
  }
  __device__ static void load(const float* slab_row, int thread, float (&to)[kPer]) {
#pragma unroll
    for (int i = 0; i < kPer; i += kPiece) {
      const float* from = slab_row + at(thread, i);
      if constexpr (kPiece == 4) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
      } else if constexpr (kPiece == 2) {
        const float2 two = *reinterpret_cast<const float2*>(from);
        to[i] = two.x;
        to[i + 1] = two.y;
      } else {
        to[i] = *from;
      }
    }
  }
};

template <int kM_, int kN_, int kDepth_, int kPerM_, int kPerN_, int kThreads_, int kBlocks_>
struct Tile {
  static constexpr int kM = kM_;
  static constexpr int kN = kN_;
  static constexpr int kDepth = kDepth_;
  static constexpr int kPerM = kPerM_;
  static constexpr int kPerN = kPerN_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kBlocks = kBlocks_;  // on an SM, for the register limit
  using SpreadM = Spread<kM, kPerM>;
  using SpreadN = Spread<kN, kPerN>;
  static constexpr int kMultipliers = SpreadM::kThreads * SpreadN::kThreads;
  static_assert(kMultipliers <= kThreads && kMultipliers % kWarp == 0);

  __device__ static int thread_m() { return static_cast<int>(threadIdx.x) / SpreadN::kThreads; }
  __device__ static int thread_n() { return static_cast<int>(threadIdx.x) % SpreadN::kThreads; }
};

// For few rows the chain's own latency is the bound: one output and four rows a thread, and slabs
// so deep that multiplying one takes longer than the next one's way from memory.
using SkinnyTile = Tile<8, 32, 256, 4, 1, 256, 2>;
using SmallTile = Tile<32, 32, 64, 4, 2, 128, 5>;
using MediumTile = Tile<64, 64, 32, 4, 4, 256, 3>;
using LargeTile = Tile<128, 64, 16, 8, 4, 256, 2>;

/// Which elements of a slab [kDepth][kExtent] a thread carries. Where the reduction index is the
/// contiguous one in memory, 8 lanes share a row's 32 bytes and 4 rows a warp: whole sectors, and
/// with the padding of 4 no two lanes write the same bank. Otherwise lanes run along the extent.
template <int kExtent, int kDepth, int kThreads, bool kDepthContiguous>
struct SlabMap {
  static constexpr int kCount = kExtent * kDepth / kThreads;
  static constexpr int kPitch = kExtent + (kExtent >= 32 ? 4 : 0);
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kLanesDeep = kDepthContiguous ? 8 : (kExtent >= kWarp ? 1 : kWarp / kExtent);
  static constexpr int kLanesWide = kWarp / kLanesDeep;
  static constexpr int kUnitsDeep = kDepth / kLanesDeep;
  static_assert(kUnitsDeep % kWarps == 0 || kWarps % kUnitsDeep == 0);
  static_assert(kExtent % kLanesWide == 0 && kCount * kThreads == kExtent * kDepth);

  __device__ static int depth(int j) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int in_unit = kDepthContiguous ? lane % kLanesDeep : lane / kLanesWide;
    if constexpr (kUnitsDeep >= kWarps) {
      return (warp + j % (kUnitsDeep / kWarps) * kWarps) * kLanesDeep + in_unit;
    } else {
      return warp % kUnitsDeep * kLanesDeep + in_unit;
    }
  }
  __device__ static int wide(int j) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int in_unit = kDepthContiguous ? lane / kLanesDeep : lane % kLanesWide;
    if constexpr (kUnitsDeep >= kWarps) {
      return j / (kUnitsDeep / kWarps) * kLanesWide + in_unit;
    } else {
      return (warp / kUnitsDeep + j * (kWarps / kUnitsDeep)) * kLanesWide + in_unit;
    }
  }
};

/// One operand's slabs: from memory to registers to shared memory. Source: an operand with Raw,
/// kDepthContiguous, fetch(wide, depth) -> Raw (of nothing for elements outside), value(Raw).
template <int kExtent, typename Tile, typename Source>
struct SlabLoader {
  using Map = SlabMap<kExtent, Tile::kDepth, Tile::kThreads, Source::kDepthContiguous>;
  static constexpr int kFloats = Map::kPitch * Tile::kDepth;
  typename Source::Raw raw[Map::kCount];

  __device__ void fetch(const Source& source, std::int64_t first) {
#pragma unroll
    for (int j = 0; j < Map::kCount; ++j) {
      raw[j] = source.fetch(Map::wide(j), first + Map::depth(j));
    }
  }
  __device__ void store(const Source& source, float* slab) const {
#pragma unroll
    for (int j = 0; j < Map::kCount; ++j) {
      slab[Map::depth(j) * Map::kPitch + Map::wide(j)] = source.value(raw[j]);
    }
  }
};

template <typename Tile>
using Sums = float[Tile::kPerM][Tile::kPerN];

/// Continues the chains of `sums` over `count` reduction indices of two slabs.
template <typename Tile, int kPitchA, int kPitchB>
__device__ __forceinline__ void multiply_slab(const float* slab_a, const float* slab_b, int count,
                                              Sums<Tile>& sums) {
#pragma unroll 8
  for (int k = 0; k < count; ++k) {
    float a[Tile::kPerM];
    float b[Tile::kPerN];
    Tile::SpreadM::load(slab_a + k * kPitchA, Tile::thread_m(), a);
    Tile::SpreadN::load(slab_b + k * kPitchB, Tile::thread_n(), b);
#pragma unroll
    for (int m = 0; m < Tile::kPerM; ++m) {
#pragma unroll
      for (int n = 0; n < Tile::kPerN; ++n) {
        sums[m][n] = fmaf(a[m], b[n], sums[m][n]);
      }
    }
  }
}

/// Continues the chains over reduction indices [0, depth) of a (the rows of the tile) and b (its
/// columns). Called by the whole block; threads beyond kMultipliers only carry.
template <typename Tile, typename A, typename B>
__device__ __forceinline__ void multiply_tile(const A& a, const B& b, std::int64_t depth,
                                              Sums<Tile>& sums) {
  using LoaderA = SlabLoader<Tile::kM, Tile, A>;
  using LoaderB = SlabLoader<Tile::kN, Tile, B>;
  __shared__ alignas(16) float slab_a[LoaderA::kFloats];
  __shared__ alignas(16) float slab_b[LoaderB::kFloats];
  LoaderA carry_a;
  LoaderB carry_b;
  carry_a.fetch(a, 0);
  carry_b.fetch(b, 0);
  for (std::int64_t first = 0; first < depth; first += Tile::kDepth) {
    __syncthreads();  // nobody reads the slab before any more
    carry_a.store(a, slab_a);
    carry_b.store(b, slab_b);
    __syncthreads();  // the slab is whole
    if (first + Tile::kDepth < depth) {
      carry_a.fetch(a, first + Tile::kDepth);
      carry_b.fetch(b, first + Tile::kDepth);
    }
    // Not beyond the end: adding a product of zeros would turn a sum of -0 into 0.
    const auto count = static_cast<int>(min(depth - first, std::int64_t{Tile::kDepth}));
    if (threadIdx.x < Tile::kMultipliers) {
      multiply_slab<Tile, LoaderA::Map::kPitch, LoaderB::Map::kPitch>(slab_a, slab_b, count, sums);
    }
  }
}

/// Starts the chains from `y`, or from 0 when it is null. y: element (0, 0) of the tile.
template <typename Tile>
__device__ __forceinline__ void begin_sums(const float* y, std::int64_t stride, std::int64_t rows,
                                           std::int64_t cols, Sums<Tile>& sums) {
#pragma unroll
  for (int m = 0; m < Tile::kPerM; ++m) {
#pragma unroll
    for (int n = 0; n < Tile::kPerN; ++n) {
      const int row = Tile::SpreadM::at(Tile::thread_m(), m);
      const int col = Tile::SpreadN::at(Tile::thread_n(), n);
      const bool inside =
          y != nullptr && threadIdx.x < Tile::kMultipliers && row < rows && col < cols;
      sums[m][n] = inside ? y[row * stride + col] : 0.0F;
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void end_sums(float* y, std::int64_t stride, std::int64_t rows,
                                         std::int64_t cols, const Sums<Tile>& sums) {
  if (threadIdx.x >= Tile::kMultipliers) {
    return;
  }
#pragma unroll
  for (int m = 0; m < Tile::kPerM; ++m) {
#pragma unroll
    for (int n = 0; n < Tile::kPerN; ++n) {
      const int row = Tile::SpreadM::at(Tile::thread_m(), m);
      const int col = Tile::SpreadN::at(Tile::thread_n(), n);
      if (row < rows && col < cols) {
        y[row * stride + col] = sums[m][n];
      }
    }
  }
}

}  // namespace tandem::cuda
