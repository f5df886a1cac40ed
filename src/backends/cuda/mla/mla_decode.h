// mla_decode.h — the law of the Hopper kernel of absorbed MLA, and how its work is cut.
//
// The law. A row that sees n keys is attended in splits of split_tiles(heads, n) tiles of 64 keys,
// from position 0. In a split, tile after tile in order of position:
//   s  = (sum of 18 products of 16 channels, in order) + (the same of the other 18)
//   m' = max(m, scores of the tile);  p = exp2(s - m'), rounded to 16 bits for the products
//   l' = l 2^(m - m') + p, in 32 chains of two keys a tile, added in one order at the end
//   o' = o 2^(m - m') + 4 products of 16 keys, in order
// Splits are merged in order of position. So a row's bits depend on its own query and keys and on
// the model's number of heads alone: which other rows or heads share a CTA, pages, stages, grid and
// launch change nothing, and decode, verify, prefill and training agree. No choice made here
// (choose_decode) is part of the law. Masked keys have weight 0; only when one that a row does not
// see but a later row of its sequence does is NaN or infinite does it reach both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "backends/cuda/runtime/device_info.h"

namespace tandem::cuda {

inline constexpr int kDecodeDim = 576;  // channels of a latent row, of which
inline constexpr int kDecodeLatent = 512;
inline constexpr int kDecodeTile = 64;            // keys
inline constexpr int kDecodeColumns = 48;         // (row, head) pairs of a CTA at most
inline constexpr int kDecodeRows = 256;           // rows of a launch, each with a place in its plan
inline constexpr int kDecodeBoxBytes = 64 * 128;  // 64 keys by 64 channels of 16 bits
inline constexpr int kDecodeTileBytes = kDecodeDim / 64 * kDecodeBoxBytes;

/// A sequence alone shall fill the GPU: by CTAs, or by pairs of them when a row's heads take two.
/// And a split's partial sums (2 KiB a head) shall cost little beside its keys (1.1 KiB each).
struct SplitLaw {
  int least_tiles;  // of a split
  int most_splits;
};
[[nodiscard]] constexpr SplitLaw split_law(int heads) {
  return heads <= kDecodeColumns ? SplitLaw{4, 128} : SplitLaw{8, 64};
}
[[nodiscard]] constexpr int decode_tiles(int keys) {
  return (keys + kDecodeTile - 1) / kDecodeTile;
}
/// Tiles of a split of a row that sees `keys` keys.
[[nodiscard]] constexpr int split_tiles(int heads, int keys) {
  const SplitLaw law = split_law(heads);
  const int even = (decode_tiles(keys) + law.most_splits - 1) / law.most_splits;
  return even > law.least_tiles ? even : law.least_tiles;
}
[[nodiscard]] constexpr int num_splits(int heads, int keys) {
  const int size = split_tiles(heads, keys);
  return (decode_tiles(keys) + size - 1) / size;
}
/// A bound of num_splits(heads, n) for n <= keys.
[[nodiscard]] constexpr int max_splits(int heads, std::int64_t keys) {
  const SplitLaw law = split_law(heads);
  const std::int64_t shortest = std::int64_t{law.least_tiles} * kDecodeTile;
  return static_cast<int>(
      std::clamp<std::int64_t>((keys + shortest - 1) / shortest, 1, law.most_splits));
}

/// Shared memory of a CTA: offsets in bytes from a multiple of 1024.
struct DecodeShared {
  int stages;
  int tiles;     // [stages] key tiles of 9 boxes
  int q;         // 9 boxes of [columns, 128 bytes]
  int weights;   // [columns, 128 bytes]: 64 keys a column
  int exchange;  // [2 warpgroups, columns / 16, 128 threads] float4: halves of scores
  int partials;  // [2 warpgroups, 4 warps, columns / 2] floats: maxima, sums
  int shrink;    // [columns] floats
  int sums;      // [columns] {maximum, sum}
  int visible;   // [columns] ints
  int barriers;  // [2, stages] of 8 bytes
  int plan;      // DecodePlan
  int total;     // with what aligning the start may take

  static constexpr int kPlanBytes = 4 * (kDecodeRows + 1) + 3 * 4 * kDecodeRows + kDecodeRows + 4;

  constexpr DecodeShared(int columns, int num_stages)
      : stages(num_stages),
        tiles(0),
        q(stages * kDecodeTileBytes),
        weights(q + columns * kDecodeDim * 2),
        exchange(weights + columns * 128),
        partials(exchange + columns / 16 * 2 * 128 * 16),
        shrink(partials + columns * 16),
        sums(shrink + columns * 4),
        visible(sums + columns * 8),
        barriers(visible + columns * 4),
        plan(barriers + stages * 16),
        total(plan + (kPlanBytes + 15) / 16 * 16 + 1024) {}
};

struct DecodeDesc {
  int heads = 0;
  std::int64_t rows = 0;
  std::int64_t sequences = 0;
};

/// How rows and heads become columns of CTAs.
struct DecodeConfig {
  int group_rows = 1;  // consecutive rows of a sequence that share an item, at most
  int ctas = 1;        // of an item: 2 are a pair
  int columns = 16;    // of a CTA: 16, 32 or 48
  int stages = 0;
  std::int64_t smem_bytes = 0;
};

/// nullopt: out of the kernel's range, or the device has too little shared memory.
[[nodiscard]] std::optional<DecodeConfig> choose_decode(const DecodeDesc& desc,
                                                        const DeviceInfo& info);

}  // namespace tandem::cuda
