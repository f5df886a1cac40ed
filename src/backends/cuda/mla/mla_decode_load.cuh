// mla_decode_load.cuh — the loading warpgroup of mla_decode_kernel.cuh: latent rows into the ring
// of key tiles, as 9 boxes of 64 keys by 64 channels of 16 bits with swizzled 16-byte chunks.
//
// bf16 rows: a tile whose 64 keys are all seen is copied in boxes by the bulk copy engine, half by
// each CTA of a pair into both; the last tile of a row, and any tile of a page size that is no
// multiple of 8, key by key (keys beyond the end are zeros: what their memory holds must not meet a
// weight of 0). fp32 and e4m3 rows: through registers, converted.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "backends/cuda/mla/mla_decode.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/ptx/tensor_copy.cuh"
#include "backends/cuda/ptx/wgmma.cuh"

namespace tandem::cuda {

inline constexpr int kDecodeBoxes = kDecodeDim / 64;

/// Bytes from a tile's start to chunk `chunk` (of 8 channels) of a key in a box.
__device__ __forceinline__ int chunk_offset(int box, int key, int chunk) {
  return box * kDecodeBoxBytes + key * 128 + (chunk ^ (key % 8)) * 16;
}

__device__ __forceinline__ int load_thread() {
  return static_cast<int>(threadIdx.x) - kDecodeMathThreads;
}

/// Calls load(item, first key) for every tile of the block's items, in order.
template <typename Load>
__device__ __forceinline__ void for_each_tile(const DecodeBlock& block, const Load& load) {
  for (int number = block.first; number < block.num_items; number += block.step) {
    const DecodeItem item = block.item(number);
    for (int first = item.begin; first < item.end; first += kDecodeTile) {
      load(item, first);
    }
  }
}

/// The stage's last tile has been used; by both CTAs of a pair when they copy for each other.
template <bool kPair>
__device__ __forceinline__ void wait_empty(const DecodeBlock& block, RingPlace place) {
  if constexpr (kPair) {
    ptx::mbarrier_wait_cluster(block.empty(place.stage), place.parity ^ 1);
  } else {
    ptx::mbarrier_wait(block.empty(place.stage), place.parity ^ 1);
  }
}

// Copies key by key: 8 lanes take 128 bytes of a key, a warp 16 keys in four turns.
inline constexpr int kCopyTurns = 4;

struct CopiedRows {
  const std::byte* from[kCopyTurns];
  int bytes[kCopyTurns];
};

__device__ __forceinline__ int copied_key(int turn) {
  return load_thread() / kWarp * 16 + turn * 4 + load_thread() % kWarp / 8;
}

__device__ __forceinline__ CopiedRows find_rows(const DecodeBlock& block, const DecodeItem& item,
                                                int first) {
  CopiedRows rows;
#pragma unroll
  for (int i = 0; i < kCopyTurns; ++i) {
    const int position = first + copied_key(i);
    const bool there = position < item.end;
    rows.from[i] = block.x.keys.key(item.seq, there ? position : first) + load_thread() % 8 * 16;
    rows.bytes[i] = there ? 16 : 0;
  }
  return rows;
}

__device__ __forceinline__ void copy_rows(char* tile, const CopiedRows& rows) {
#pragma unroll
  for (int i = 0; i < kCopyTurns; ++i) {
    char* const to = tile + chunk_offset(0, copied_key(i), load_thread() % 8);
#pragma unroll
    for (int box = 0; box < kDecodeBoxes; ++box) {
      ptx::cp_async_16(to + box * kDecodeBoxBytes, rows.from[i] + box * 128, rows.bytes[i]);
    }
  }
}

/// The run of keys that this lane of the first loading warp copies in boxes: its key in the tile,
/// or -1. The CTAs of a pair take half of the keys each.
template <bool kPair>
__device__ __forceinline__ int boxed_key(const DecodeBlock& block) {
  constexpr int kKeys = kPair ? kDecodeTile / 2 : kDecodeTile;
  const int key = load_thread() * block.x.box_rows;
  return load_thread() < kWarp && key < kKeys ? key + block.rank * (kDecodeTile - kKeys) : -1;
}

template <bool kPair>
__device__ __forceinline__ void copy_boxes(const DecodeBlock& block, int stage, int key, int row,
                                           std::uint64_t policy) {
  if (load_thread() == 0) {
    ptx::mbarrier_expect(block.full(stage), kDecodeTileBytes);
  }
  __syncwarp();
  if (key < 0) {
    return;
  }
  char* const to = block.tile(stage) + key * 128;
  for (int box = 0; box < kDecodeBoxes; ++box) {
    if constexpr (kPair) {
      ptx::tensor_copy_2d_multicast(to + box * kDecodeBoxBytes, block.x.boxes, box * 64, row,
                                    block.full(stage), policy, 3);
    } else {
      ptx::tensor_copy_2d(to + box * kDecodeBoxBytes, block.x.boxes, box * 64, row,
                          block.full(stage), policy);
    }
  }
}

/// Copied keys have landed: tells the math threads.
__device__ __forceinline__ void hand_over(const DecodeBlock& block, int stage) {
  ptx::async_proxy_fence();
  __syncwarp();
  ptx::named_barrier_sync(kDecodeLoadBarrier, kDecodeGroupThreads);
  if (load_thread() == 0) {
    ptx::mbarrier_arrive(block.full(stage));
  }
}

/// bf16 rows. A tile copied key by key is handed over once the next one is on its way.
template <bool kPair>
__device__ void load_tiles_bf16(const DecodeBlock& block) {
  RingPlace place;
  int pending = -1;  // the stage that waits to be handed over
  const int key = block.x.box_rows > 0 ? boxed_key<kPair>(block) : -1;
  const std::uint64_t policy = block.x.read_once ? ptx::leave_l2_first() : ptx::keep_in_l2();
  for_each_tile(block, [&](const DecodeItem& item, int first) {
    if (block.x.box_rows > 0 && first + kDecodeTile <= item.end) {
      const int row = key >= 0 ? static_cast<int>(block.x.keys.row(item.seq, first + key)) : 0;
      wait_empty<kPair>(block, place);
      if (load_thread() < kWarp) {
        copy_boxes<kPair>(block, place.stage, key, row, policy);
      }
      ptx::cp_async_wait<0>();
      if (pending >= 0) {
        hand_over(block, pending);
      }
      pending = -1;
    } else {
      const CopiedRows rows = find_rows(block, item, first);
      wait_empty<kPair>(block, place);
      copy_rows(block.tile(place.stage), rows);
      ptx::cp_async_commit();
      if (pending >= 0) {
        ptx::cp_async_wait<1>();
        hand_over(block, pending);
      }
      pending = place.stage;
    }
    place.advance(block.at.stages);
  });
  if (pending >= 0) {
    ptx::cp_async_wait<0>();
    hand_over(block, pending);
  }
}

// Rows through registers. A thread's units: some chunks of one key. What a unit of a format is:
//   kKeys     keys of a thread in a tile;  kParts  units of a key
//   Data      what a unit loads
//   key(i)    the thread's i-th key;  load, store
struct E4m3Units {  // 4 lanes share a key, 16 channels each of every box
  static constexpr int kKeys = 2;
  static constexpr int kParts = 1;
  struct Data {
    uint4 chunk[kDecodeBoxes];
  };

  static __device__ int key(int i) {
    return load_thread() / kWarp * 16 + i * 8 + load_thread() % kWarp / 4;
  }
  static __device__ void load(Data& data, const std::byte* row, int /*part*/) {
#pragma unroll
    for (int box = 0; box < kDecodeBoxes; ++box) {
      data.chunk[box] =
          __ldcg(reinterpret_cast<const uint4*>(row + box * 64 + load_thread() % 4 * 16));
    }
  }
  static __device__ std::uint32_t to_f16(std::uint32_t two) {
    const __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two & 0xFFFFU), __NV_E4M3);
    return std::uint32_t{pair.y} << 16 | pair.x;
  }
  static __device__ uint4 to_f16(std::uint32_t low, std::uint32_t high) {
    return {to_f16(low), to_f16(low >> 16), to_f16(high), to_f16(high >> 16)};
  }
  static __device__ void store(char* tile, const Data& data, int key, int /*part*/) {
#pragma unroll
    for (int box = 0; box < kDecodeBoxes; ++box) {
      const int chunk = load_thread() % 4 * 2;
      const uint4 e = data.chunk[box];
      *reinterpret_cast<uint4*>(tile + chunk_offset(box, key, chunk)) = to_f16(e.x, e.y);
      *reinterpret_cast<uint4*>(tile + chunk_offset(box, key, chunk + 1)) = to_f16(e.z, e.w);
    }
  }
};

struct F32Units {  // 8 lanes share a key, 8 channels each of every box
  static constexpr int kKeys = 4;
  static constexpr int kParts = 3;
  static constexpr int kPartBoxes = kDecodeBoxes / kParts;
  struct Data {
    float4 half[2 * kPartBoxes];
  };

  static __device__ int key(int i) { return copied_key(i); }
  static __device__ void load(Data& data, const std::byte* row, int part) {
    const auto* const from = reinterpret_cast<const float4*>(row);
#pragma unroll
    for (int box = 0; box < kPartBoxes; ++box) {
      const int chunk = (part * kPartBoxes + box) * 8 + load_thread() % 8;
      data.half[2 * box] = __ldcg(from + 2 * chunk);
      data.half[2 * box + 1] = __ldcg(from + 2 * chunk + 1);
    }
  }
  static __device__ std::uint32_t to_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  static __device__ void store(char* tile, const Data& data, int key, int part) {
#pragma unroll
    for (int box = 0; box < kPartBoxes; ++box) {
      const float4 a = data.half[2 * box];
      const float4 b = data.half[2 * box + 1];
      *reinterpret_cast<uint4*>(tile +
                                chunk_offset(part * kPartBoxes + box, key, load_thread() % 8)) = {
          to_bf16(a.x, a.y), to_bf16(a.z, a.w), to_bf16(b.x, b.y), to_bf16(b.z, b.w)};
    }
  }
};

/// Walks over a thread's units, tile after tile.
template <typename Units>
struct UnitCursor {
  DecodeItem item;
  int number;  // of the item
  int first;   // key of the tile
  int unit = 0;

  static constexpr int kUnits = Units::kKeys * Units::kParts;

  __device__ explicit UnitCursor(const DecodeBlock& block)
      : item(block.item(block.first)), number(block.first), first(item.begin) {}
  __device__ bool valid(const DecodeBlock& block) const { return number < block.num_items; }
  __device__ void advance(const DecodeBlock& block) {
    if (++unit < kUnits) {
      return;
    }
    unit = 0;
    first += kDecodeTile;
    if (first < item.end) {
      return;
    }
    number += block.step;
    if (number < block.num_items) {
      item = block.item(number);
      first = item.begin;
    }
  }
  __device__ int key() const { return Units::key(unit / Units::kParts); }

  __device__ void load(const DecodeBlock& block, typename Units::Data& data) const {
    const int position = first + key();
    if (position < item.end) {
      Units::load(data, block.x.keys.key(item.seq, position), unit % Units::kParts);
    } else {
      data = {};
    }
  }
  __device__ void store(const DecodeBlock& block, RingPlace& place,
                        const typename Units::Data& data) const {
    if (unit == 0) {
      wait_empty<false>(block, place);
    }
    Units::store(block.tile(place.stage), data, key(), unit % Units::kParts);
    if (unit == kUnits - 1) {
      hand_over(block, place.stage);
      place.advance(block.at.stages);
    }
  }
};

/// Two units in turn: the next one's loads are in flight while one is stored.
template <typename Units>
__device__ void load_tiles_converted(const DecodeBlock& block) {
  static_assert(UnitCursor<Units>::kUnits % 2 == 0);
  UnitCursor<Units> unit(block);
  RingPlace place;
  typename Units::Data even;
  typename Units::Data odd;
  unit.load(block, even);
  while (unit.valid(block)) {
    UnitCursor<Units> next = unit;
    next.advance(block);
    next.load(block, odd);
    unit.store(block, place, even);
    unit = next;
    unit.advance(block);
    if (unit.valid(block)) {
      unit.load(block, even);
    }
    next.store(block, place, odd);
  }
}

}  // namespace tandem::cuda
