// mla_tensor_load.cuh — the loading warps of mla_tensor.cu, which bring cache rows as bf16 into the
// ring of key tiles: bf16 rows by bulk copies, fp8 and fp32 rows through registers. And what they
// share with the math warps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/mla/mla_tensor.cuh"
#include "backends/cuda/ptx/bulk_copy.cuh"
#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"

namespace tandem::cuda {

// Named barriers. Empty: the math warps arrive, the loaders wait.
inline constexpr int kEmptyBarrier = 1;  // + stage
inline constexpr int kMathBarrier = kEmptyBarrier + kStages;

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
  /// Completed once a use of the tile's stage: every loading thread arrives.
  __device__ std::uint64_t* full(int number) const {
    return reinterpret_cast<std::uint64_t*>(shared + at.full) + number % kStages;
  }
  __device__ Item item(int number) const { return Item(x, plan(), groups, number); }
};

inline constexpr int kLoadThreads = kLoadWarps * kWarp;

/// The stage of tile `number` may be overwritten. All loading threads call, once a tile.
__device__ __forceinline__ void wait_until_free(int number) {
  __syncwarp();
  if (number >= kStages) {
    ptx::named_barrier_sync(kEmptyBarrier + number % kStages, kTensorThreads);
  }
}
/// Pairs the math warps' last arrivals. All loading threads call.
__device__ __forceinline__ void wait_for_last_uses(int num_tiles) {
  __syncwarp();
  for (int tile = max(num_tiles - kStages, 0); tile < num_tiles; ++tile) {
    ptx::named_barrier_sync(kEmptyBarrier + tile % kStages, kTensorThreads);
  }
}

/// Walks over the tiles of the block's items.
struct TileWalk {
  Item item;
  int number;  // of the item
  int tile;    // tiles of the block before this one
  int first;   // key of the tile

  __device__ explicit TileWalk(const Block& block)
      : item(block.item(static_cast<int>(blockIdx.x))),
        number(static_cast<int>(blockIdx.x)),
        tile(0),
        first(item.begin) {}
  __device__ bool valid(const Block& block) const { return number < block.num_items; }
  __device__ void advance(const Block& block) {
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
  /// Row of a key of the tile; null for keys that the query does not see. Those become zeros: what
  /// their memory holds must not meet a weight of 0.
  __device__ const std::byte* key(const Block& block, int key_of_tile) const {
    const int position = first + key_of_tile;
    return position < item.end ? block.x.keys.key(item.seq, position) : nullptr;
  }
};

/// bf16 rows, half a row a thread.
inline __device__ void copy_tiles(const Block& block) {
  static_assert(kLoadThreads == 2 * kTileKeys);
  const int thread = static_cast<int>(threadIdx.x) - kMathThreads;
  const int bytes = block.x.dim;  // of half a row
  const int offset = thread % 2 * bytes;
  TileWalk walk(block);
  for (; walk.valid(block); walk.advance(block)) {
    const std::byte* const from = walk.key(block, thread / 2);
    wait_until_free(walk.tile);
    char* const to = block.tile(walk.tile) + thread / 2 * block.at.row_bytes + offset;
    std::uint64_t* const full = block.full(walk.tile);
    if (from != nullptr) {
      ptx::mbarrier_expect(full, static_cast<unsigned>(bytes));
      ptx::bulk_copy(to, from + offset, static_cast<unsigned>(bytes), full);
    } else {
      for (int i = 0; i < bytes; i += 16) {
        *reinterpret_cast<uint4*>(to + i) = uint4{};
      }
      ptx::async_proxy_fence();  // a later copy comes into the same place
      ptx::mbarrier_arrive(full);
    }
  }
  wait_for_last_uses(walk.tile);
}

// Rows through registers: 8 lanes read 128 adjacent bytes of a key; a warp's 4 keys lie 4 rows
// apart in the tile, so that the halves of a store of 8 bytes a lane fill all banks.
inline constexpr int kLanesPerKey = 8;
inline constexpr int kKeysPerLane = kTileKeys / (kLoadThreads / kLanesPerKey);

/// The first of this lane's adjacent keys in a tile.
__device__ __forceinline__ int first_key_of_lane() {
  const int warp = static_cast<int>(threadIdx.x) / kWarp - kMathWarps;
  const int quarter = static_cast<int>(threadIdx.x) % kWarp / kLanesPerKey;
  return warp * (kTileKeys / kLoadWarps) + quarter * kKeysPerLane;
}

// fp8 rows: pieces of 16 elements; as many in flight as a row of K3 has.
inline constexpr int kPieces = 5;  // a lane and key
inline constexpr int kPieceElements = 16;

__device__ __forceinline__ void store_fp8_piece(char* to, const uint4& piece) {
  const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
  std::uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 two = ptx::e4m3x2_to_float2(words[i / 2] >> (i % 2 * 16) & 0xFFFFU);
    pairs[i] = ptx::cvt_bf16x2(two.x, two.y);
  }
  *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
  *reinterpret_cast<uint4*>(to + 16) = {pairs[4], pairs[5], pairs[6], pairs[7]};
}

inline __device__ void load_fp8_tiles(const Block& block) {
  constexpr int kStep = kPieces * kLanesPerKey * kPieceElements;
  const int lane = static_cast<int>(threadIdx.x) % kLanesPerKey;
  const int first_key = first_key_of_lane();
  TileWalk walk(block);
  for (; walk.valid(block); walk.advance(block)) {
    const std::byte* keys[kKeysPerLane];
#pragma unroll
    for (int k = 0; k < kKeysPerLane; ++k) {
      keys[k] = walk.key(block, first_key + k);
    }
    char* const tile = block.tile(walk.tile) + first_key * block.at.row_bytes;
    for (int begin = 0; begin < block.x.dim; begin += kStep) {
      const auto channel = [&](int i) {
        return begin + (i * kLanesPerKey + lane) * kPieceElements;
      };
      uint4 data[kKeysPerLane][kPieces];
#pragma unroll
      for (int k = 0; k < kKeysPerLane; ++k) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          data[k][i] = keys[k] != nullptr && channel(i) < block.x.dim
                           ? __ldcg(reinterpret_cast<const uint4*>(keys[k] + channel(i)))
                           : uint4{};
        }
      }
      if (begin == 0) {
        wait_until_free(walk.tile);
      }
#pragma unroll
      for (int k = 0; k < kKeysPerLane; ++k) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          if (channel(i) < block.x.dim) {
            store_fp8_piece(tile + k * block.at.row_bytes + channel(i) * 2, data[k][i]);
          }
        }
      }
    }
    ptx::mbarrier_arrive(block.full(walk.tile));
  }
  wait_for_last_uses(walk.tile);
}

// fp32 rows: units of 9 float4 a lane; with two in flight, 18 to 36 KiB an SM.
inline constexpr int kUnitLoads = 9;
inline constexpr int kUnitChannels = kUnitLoads * kLanesPerKey * 4;

/// Walks over the units of a lane: the parts of its keys of the tiles of the block's items.
struct Unit {
  TileWalk walk;
  int key;  // of this lane's in the tile
  int part;

  __device__ explicit Unit(const Block& block) : walk(block), key(0), part(0) {}
  __device__ bool valid(const Block& block) const { return walk.valid(block); }
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
    walk.advance(block);
  }
  /// The lane's key in the tile.
  __device__ int row() const { return first_key_of_lane() + key; }
  __device__ int channel() const {
    return part * kUnitChannels + static_cast<int>(threadIdx.x) % kLanesPerKey * 4;
  }
};

template <bool kAligned>
__device__ __forceinline__ void load_unit(const Block& block, const Unit& unit,
                                          float4 (&data)[kUnitLoads]) {
  const std::byte* const key = unit.walk.key(block, unit.row());
  const float* const from = reinterpret_cast<const float*>(key) + unit.channel();
#pragma unroll
  for (int i = 0; i < kUnitLoads; ++i) {
    const int channel = i * kLanesPerKey * 4;
    data[i] = key != nullptr && unit.channel() + channel < block.x.dim
                  ? load_4(from + channel, kAligned)
                  : float4{};
  }
}

__device__ __forceinline__ void store_unit(const Block& block, const Unit& unit, int parts,
                                           const float4 (&data)[kUnitLoads]) {
  if (unit.starts_tile()) {
    wait_until_free(unit.walk.tile);
  }
  char* const to =
      block.tile(unit.walk.tile) + unit.row() * block.at.row_bytes + unit.channel() * 2;
#pragma unroll
  for (int i = 0; i < kUnitLoads; ++i) {
    const int channel = i * kLanesPerKey * 4;
    if (unit.channel() + channel < block.x.dim) {
      *reinterpret_cast<uint2*>(to + channel * 2) = {ptx::cvt_bf16x2(data[i].x, data[i].y),
                                                     ptx::cvt_bf16x2(data[i].z, data[i].w)};
    }
  }
  if (unit.ends_tile(parts)) {
    ptx::mbarrier_arrive(block.full(unit.walk.tile));
  }
}

/// Two units in turn: the next one's loads are in flight while one is stored.
template <bool kAligned>
__device__ void load_fp32_tiles(const Block& block) {
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
  wait_for_last_uses(unit.walk.tile);
}

inline __device__ void load_tiles(const Block& block) {
  switch (block.x.keys.format) {
    case LatentFormat::kF32:
      return block.x.keys_aligned ? load_fp32_tiles<true>(block) : load_fp32_tiles<false>(block);
    case LatentFormat::kBF16:
      return copy_tiles(block);
    case LatentFormat::kFp8:
      return load_fp8_tiles(block);
  }
}

}  // namespace tandem::cuda
