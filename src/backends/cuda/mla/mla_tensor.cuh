// mla_tensor.cuh — the parts of mla_tensor.cu that lay out work and shared memory.
#pragma once

#include <cstdint>

#include "backends/cuda/mla/mla.cuh"
#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {

inline constexpr int kTileKeys = kChunkUnit;
inline constexpr int kMathWarps = 8;
inline constexpr int kLoadWarps = 4;
inline constexpr int kMathThreads = kMathWarps * kWarp;
inline constexpr int kTensorThreads = (kMathWarps + kLoadWarps) * kWarp;
inline constexpr int kStages = 2;        // key tiles in shared memory
inline constexpr int kTensorRows = 256;  // rows of a launch, each with a place in the plan
inline constexpr int kMmaRows = 16;      // heads of an mma
inline constexpr int kMaxHeadTiles = 3;  // 48 heads x 512 channels are 96 sums a math thread
inline constexpr int kScoreStride = kTileKeys + 8;   // floats: 8 rows of pairs in distinct banks
inline constexpr int kWeightStride = kTileKeys + 8;  // bf16: 8 rows of 16 bytes in distinct banks
static_assert(kTensorRows <= kTensorThreads);

/// How heads are dealt to blocks: groups of `tiles` mma tiles. It never enters a result.
struct HeadGroups {
  int tiles;
  int count;

  __host__ __device__ HeadGroups(int heads, int tiles_each)
      : tiles(tiles_each), count((head_tiles(heads) + tiles_each - 1) / tiles_each) {}
  [[nodiscard]] __host__ __device__ static constexpr int head_tiles(int heads) {
    return (heads + kMmaRows - 1) / kMmaRows;
  }
  /// The largest groups that a block can take, of equal sizes.
  [[nodiscard]] static constexpr int most_tiles(int heads) {
    const int groups = (head_tiles(heads) + kMaxHeadTiles - 1) / kMaxHeadTiles;
    return (head_tiles(heads) + groups - 1) / groups;
  }
  /// The smallest groups, hence the shortest work, for which `chunks` chunks still fit on the
  /// device at once.
  [[nodiscard]] static constexpr int tiles_for(int heads, int chunks, int num_sms) {
    int tiles = 1;
    while (tiles < most_tiles(heads) &&
           chunks * ((head_tiles(heads) + tiles - 1) / tiles) > num_sms) {
      ++tiles;
    }
    return tiles;
  }
};

/// Shared memory of a block: offsets in bytes.
struct TensorShared {
  int row_bytes;  // of a query or a key in bf16; 16 bytes more than it needs, so that the 8 rows of
                  // an ldmatrix lie in distinct banks
  int tile_bytes;
  int q;        // [heads of the group] rows
  int tiles;    // [kStages, kTileKeys] rows
  int scores;   // [heads, kScoreStride] floats
  int weights;  // [heads, kWeightStride] bf16
  int shrink;   // [heads] floats
  int full;     // [kStages] barriers: the tile has been loaded
  int plan;     // Plan
  int total;

  __host__ __device__ TensorShared(int head_tiles, int dim);
};

/// The items of a launch: first_item[r] chunks come before row r's.
struct Plan {  // rows without keys have no items
  int first_item[kTensorRows + 1];
  int seq[kTensorRows];
  int visible[kTensorRows];

  /// All threads of the block must call.
  __device__ void build(const Attention& x);
};

inline __host__ __device__ TensorShared::TensorShared(int head_tiles, int dim) {
  const int heads = head_tiles * kMmaRows;
  row_bytes = dim * 2 + 16;
  tile_bytes = kTileKeys * row_bytes;
  q = 0;
  tiles = heads * row_bytes;
  scores = tiles + kStages * tile_bytes;
  weights = scores + heads * kScoreStride * 4;
  shrink = weights + heads * kWeightStride * 2;
  full = shrink + heads * 4;
  plan = full + kStages * 8;
  total = plan + static_cast<int>(sizeof(Plan));
}

inline __device__ void Plan::build(const Attention& x) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < x.num_rows) {
    const int t = x.first_row + row;
    const RowKeys keys = x.keys.of_row(t);
    seq[row] = keys.seq;
    visible[row] = keys.visible;
    first_item[row + 1] = keys.chunks();
  }
  __syncthreads();
  if (row < kWarp) {
    place_ranges(first_item, x.num_rows);
  }
  __syncthreads();
}

/// A chunk of a row's keys for one group of heads.
struct Item {
  int row;  // of the launch
  int seq;
  int chunk;
  int head;   // first of the group
  int begin;  // keys
  int end;
  bool whole;  // all keys of the row

  /// Groups of heads of one chunk are neighbours: they run together and share its keys in L2.
  __device__ Item(const Attention& x, const Plan& plan, const HeadGroups& groups, int number) {
    const int index = number / groups.count;
    head = number % groups.count * groups.tiles * kMmaRows;
    row = range_of(plan.first_item, x.num_rows, index);
    seq = plan.seq[row];
    chunk = index - plan.first_item[row];
    const int size = chunk_keys(plan.visible[row]);
    begin = chunk * size;
    end = min(begin + size, plan.visible[row]);
    whole = size >= plan.visible[row];
  }
};

}  // namespace tandem::cuda
