// mla_tensor_load.cuh — the loading warps of mla_tensor.cu: cache rows in fp32 through registers,
// as bf16 into the ring of key tiles; and what they share with the math warps.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backends/cuda/mla_tensor.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"

namespace tandem::cuda {

// Named barriers. Full: the loaders arrive, the math warps wait. Empty: the other way round.
inline constexpr int kFullBarrier = 1;  // + stage
inline constexpr int kEmptyBarrier = kFullBarrier + kStages;
inline constexpr int kMathBarrier = kEmptyBarrier + kStages;

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

__device__ __forceinline__ float4 load_4(const float* from, bool aligned) {
  return aligned ? __ldcg(reinterpret_cast<const float4*>(from))
                 : float4{from[0], from[1], from[2], from[3]};
}

/// What every thread knows of its block.
struct Block {
  const Attention& x;
  HeadGroups groups;
  TensorShared at;
  char* shared;
  int num_items;

  __device__ const Plan& plan() const { return *reinterpret_cast<const Plan*>(shared + at.plan); }
  __device__ char* tile(int number) const {
    return shared + at.tiles + number % kStages * at.tile_bytes;
  }
  __device__ Item item(int number) const { return Item(x, plan(), groups, number); }
};

// 8 lanes read 128 adjacent bytes of a key; a warp's 4 keys lie 4 rows apart in the tile, so that
// the halves of a store of 8 bytes a lane fill all banks.
inline constexpr int kLanesPerKey = 8;
inline constexpr int kUnitLoads = 9;  // float4 a lane: with two units in flight, 18 to 36 KiB an SM
inline constexpr int kUnitChannels = kUnitLoads * kLanesPerKey * 4;
inline constexpr int kKeysPerLane = kTileKeys / (kLoadWarps * kWarp / kLanesPerKey);

/// Walks over the units of a lane: the parts of its keys of the tiles of the block's items.
struct Unit {
  Item item;
  int number;  // of the item
  int tile;    // tiles of the block before this one
  int first;   // key of the tile
  int key;     // of this lane's in the tile
  int part;

  __device__ explicit Unit(const Block& block)
      : item(block.item(static_cast<int>(blockIdx.x))),
        number(static_cast<int>(blockIdx.x)),
        tile(0),
        first(item.begin),
        key(0),
        part(0) {}
  __device__ bool valid(const Block& block) const { return number < block.num_items; }
  __device__ bool starts_tile() const { return key == 0 && part == 0; }
  __device__ bool ends_tile(int parts) const {
    return key == kKeysPerLane - 1 && part == parts - 1;
  }
  __device__ void advance(const Block& block, int parts) {
    if (++part < parts) {
      return;
    }
    part = 0;
    if (++key < kKeysPerLane) {
      return;
    }
    key = 0;
    ++tile;
    first += kTileKeys;
    if (first < item.end) {
      return;
    }
    number += static_cast<int>(gridDim.x);
    if (number < block.num_items) {
      item = block.item(number);
      first = item.begin;
    }
  }
  /// The lane's key in the tile.
  __device__ int row() const {
    const int warp = static_cast<int>(threadIdx.x) / kWarp - kMathWarps;
    const int quarter = static_cast<int>(threadIdx.x) % kWarp / kLanesPerKey;
    return warp * (kTileKeys / kLoadWarps) + quarter * kKeysPerLane + key;
  }
  __device__ int channel() const {
    return part * kUnitChannels + static_cast<int>(threadIdx.x) % kLanesPerKey * 4;
  }
};

/// Keys that the row does not see are zeros: what their memory holds must not meet a weight of 0.
template <bool kAligned>
__device__ __forceinline__ void load_unit(const Block& block, const Unit& unit,
                                          float4 (&data)[kUnitLoads]) {
  const int position = unit.first + unit.row();
  const bool there = position < unit.item.end;
  const float* const from =
      block.x.keys.key(unit.item.seq, there ? position : unit.first) + unit.channel();
#pragma unroll
  for (int i = 0; i < kUnitLoads; ++i) {
    const int channel = i * kLanesPerKey * 4;
    data[i] = there && unit.channel() + channel < block.x.dim ? load_4(from + channel, kAligned)
                                                              : float4{};
  }
}

__device__ __forceinline__ void store_unit(const Block& block, const Unit& unit, int parts,
                                           const float4 (&data)[kUnitLoads]) {
  const int stage = unit.tile % kStages;
  if (unit.starts_tile() && unit.tile >= kStages) {
    ptx::named_barrier_sync(kEmptyBarrier + stage, kTensorThreads);  // the tile has been used
  }
  char* const to = block.tile(unit.tile) + unit.row() * block.at.row_bytes + unit.channel() * 2;
#pragma unroll
  for (int i = 0; i < kUnitLoads; ++i) {
    const int channel = i * kLanesPerKey * 4;
    if (unit.channel() + channel < block.x.dim) {
      *reinterpret_cast<uint2*>(to + channel * 2) = {pack_bf16(data[i].x, data[i].y),
                                                     pack_bf16(data[i].z, data[i].w)};
    }
  }
  if (unit.ends_tile(parts)) {
    ptx::named_barrier_arrive(kFullBarrier + stage, kTensorThreads);
  }
}

/// Two units in turn: the next one's loads are in flight while one is stored.
template <bool kAligned>
__device__ void load_tiles(const Block& block) {
  const int parts = (block.x.dim + kUnitChannels - 1) / kUnitChannels;
  Unit unit(block);
  float4 even[kUnitLoads];
  float4 odd[kUnitLoads];
  load_unit<kAligned>(block, unit, even);
  while (unit.valid(block)) {  // a tile has an even number of units
    Unit next = unit;
    next.advance(block, parts);
    load_unit<kAligned>(block, next, odd);
    store_unit(block, unit, parts, even);
    unit = next;
    unit.advance(block, parts);
    if (unit.valid(block)) {
      load_unit<kAligned>(block, unit, even);
    }
    store_unit(block, next, parts, odd);
  }
  for (int tile = max(unit.tile - kStages, 0); tile < unit.tile; ++tile) {
    ptx::named_barrier_sync(kEmptyBarrier + tile % kStages, kTensorThreads);  // pairs the last uses
  }
}

}  // namespace tandem::cuda
