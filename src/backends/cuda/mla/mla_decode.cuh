// mla_decode.cuh — arguments, items and shared memory of the Hopper kernel of absorbed MLA.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/mla/mla.cuh"
#include "backends/cuda/mla/mla_decode.h"
#include "backends/cuda/ptx/bulk_copy.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {

inline constexpr int kDecodeGroupThreads = 128;  // a warpgroup
inline constexpr int kDecodeMathThreads = 2 * kDecodeGroupThreads;
inline constexpr int kDecodeThreads = kDecodeMathThreads + kDecodeGroupThreads;  // and one loads
static_assert(kDecodeRows <= kDecodeThreads);

// Named barriers; 0 is __syncthreads.
inline constexpr int kDecodeMathBarrier = 1;
inline constexpr int kDecodeGroupBarrier = 2;  // + warpgroup of the math threads
inline constexpr int kDecodeLoadBarrier = 4;

/// A call, and the rows of it that one launch attends. Partials are laid out [row, split, head].
struct DecodeArgs {
  CUtensorMap boxes;  // of [box_rows, 64 channels] of the rows
  PagedKeys keys;
  Cube<float> o;
  Mat<float> lse;              // data null: not wanted
  Cube<const float> q;         // [T, H, 512]
  Cube<const float> q_shared;  // [T, H, 64]
  float scale_log2;            // of scores, in units of log 2
  int num_heads;
  int group_rows;
  int stages;
  int box_rows;    // a run of keys that one box holds; 0: keys are copied one by one
  bool read_once;  // keys need not stay in the L2 cache
  bool aligned_q;  // rows of both parts of q start at multiples of 16 bytes
  int first_row;
  int num_rows;
  int max_splits;
  float* partial_o;     // [..., 512] sum of p c
  float2* partial_sum;  // {maximum of the scaled scores, sum of p}

  __device__ std::int64_t partial(int row, int split, int head) const {
    return (static_cast<std::int64_t>(row) * max_splits + split) * num_heads + head;
  }
};

/// The items of a launch. Row r's group, if r is the last row of one, has items first_item[r] ..
/// first_item[r + 1] - 1, one a split; other rows have none.
struct DecodePlan {
  int first_item[kDecodeRows + 1];
  int seq[kDecodeRows];
  int visible[kDecodeRows];
  int start[kDecodeRows];  // the first row of the row's group
  bool leads[kDecodeRows];

  /// All threads of the block must call.
  __device__ void build(const DecodeArgs& x);
};
static_assert(sizeof(DecodePlan) <= DecodeShared::kPlanBytes);

/// Groups are consecutive rows of a sequence whose splits have the same borders.
inline __device__ void DecodePlan::build(const DecodeArgs& x) {
  const int row = static_cast<int>(threadIdx.x);
  const bool has_row = row < x.num_rows;
  int index = 0;  // of the row in its sequence
  if (has_row) {
    const int t = x.first_row + row;
    const RowKeys its = x.keys.of_row(t);
    seq[row] = its.seq;
    visible[row] = max(its.visible, 0);
    index = x.group_rows > 1 ? t - x.keys.cu_seqlens[its.seq] : 0;
  }
  __syncthreads();
  if (has_row) {
    leads[row] =
        row == 0 || index % x.group_rows == 0 ||
        split_tiles(x.num_heads, visible[row]) != split_tiles(x.num_heads, visible[row - 1]);
  }
  __syncthreads();
  if (has_row) {
    int first = row;
    while (!leads[first]) {
      --first;
    }
    start[row] = first;
    const bool last = row + 1 == x.num_rows || leads[row + 1];
    first_item[row + 1] = last ? num_splits(x.num_heads, visible[row]) : 0;
  }
  __syncthreads();
  if (row < kWarp) {
    place_ranges(first_item, x.num_rows);
  }
  __syncthreads();
}

/// A split of a group of rows.
struct DecodeItem {
  int first_row;  // of the launch
  int last_row;
  int seq;
  int split;
  int begin;  // keys
  int end;
  int unmasked;  // keys up to here are seen by all rows

  __device__ DecodeItem(const DecodeArgs& x, const DecodePlan& plan, int number) {
    last_row = range_of(plan.first_item, x.num_rows, number);
    first_row = plan.start[last_row];
    seq = plan.seq[last_row];
    split = number - plan.first_item[last_row];
    const int size = split_tiles(x.num_heads, plan.visible[last_row]) * kDecodeTile;
    begin = split * size;
    end = min(begin + size, plan.visible[last_row]);
    unmasked = min(plan.visible[first_row], end);
  }
};

/// What every thread knows of its block. Items are dealt to CTAs, or to pairs of them, in turn.
struct DecodeBlock {
  const DecodeArgs& x;
  DecodeShared at;
  char* shared;
  int rank;   // in the pair
  int first;  // item
  int step;   // items from one of the block's to the next
  int num_items;

  __device__ const DecodePlan& plan() const {
    return *reinterpret_cast<const DecodePlan*>(shared + at.plan);
  }
  __device__ DecodeItem item(int number) const { return DecodeItem(x, plan(), number); }
  __device__ std::uint64_t* full(int stage) const {
    return reinterpret_cast<std::uint64_t*>(shared + at.barriers) + stage;
  }
  __device__ std::uint64_t* empty(int stage) const { return full(at.stages + stage); }
  __device__ char* tile(int stage) const { return shared + at.tiles + stage * kDecodeTileBytes; }
  template <typename T>
  __device__ T* array(int offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }
};

/// A place in the ring of tiles, and how often it has been come by.
struct RingPlace {
  int stage = 0;
  unsigned parity = 0;

  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace tandem::cuda
