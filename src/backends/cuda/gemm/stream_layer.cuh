// stream_layer.cuh — a CTA's (or cluster's) part of one layer on the decode path, from its segments
// to finished sums; the kernel's beginning is in here. Shared by single layers, sums of two
// products and groups of layers.   Schedule, Sum, Numerics: stream.cuh
#pragma once

#include "backends/cuda/gemm/stream.cuh"
#include "backends/cuda/launch.cuh"

namespace tandem::cuda {

/// A product; `x`: the row of the calling lane's token, lane / 4.
struct StreamTerm {
  const std::uint8_t* weight;
  const float* x;
  const TensorShape& shape;
};

/// What a CTA streams: row blocks from first_block on, of all terms alike.
struct StreamWork {
  int first_block;
  int tokens;
  const std::uint8_t* up = nullptr;  // not null: the first half of the row warps takes blocks of
                                     // the term's weight, the second the same ones of this weight
};

/// The parts of the calling warp, none of which depends on the kernel before.
struct StreamWarp {
  int lane;
  int rank;  // of the CTA in its cluster
  int k_warp;
  int block;   // its first one, among the cluster's
  bool is_up;  // of StreamWork::up

  __device__ __forceinline__ StreamWarp(const StreamPlan& plan, bool gated, int blocks) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    int row_warp = warp / plan.k_warps;
    lane = static_cast<int>(threadIdx.x) % 32;
    rank = static_cast<int>(blockIdx.x) & (plan.cluster - 1);
    k_warp = warp - row_warp * plan.k_warps;
    is_up = gated && row_warp >= plan.row_warps / 2;
    row_warp -= is_up ? plan.row_warps / 2 : 0;
    block = row_warp * blocks;
  }
};

/// The row blocks of a warp.
template <WeightFormat F>
struct StreamRows {
  static constexpr int kBlocks = stream_blocks(F);
  TileRow rows[kBlocks];

  __device__ __forceinline__ StreamRows(const std::uint8_t* weight, const TensorShape& shape,
                                        int first_block) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      rows[m] = tile_row<F>(weight, shape, first_block + m);
    }
  }
};

/// A warp's segments of one term; their sums go to slots from `slot` on.
template <WeightFormat F, bool kWhole, typename Piece>
__device__ __forceinline__ void stream_term(const SegmentSums& sums, Piece& piece, bool& loaded,
                                            const StreamRows<F>& rows, const StreamTerm& term,
                                            const WarpSegments& mine, const StreamWarp& warp,
                                            int slot) {
  const F32Inputs<kWhole> inputs(term.x, term.shape.in, warp.lane);
  stream_segments(piece, rows.rows, inputs, term.shape.k_tiles, mine, loaded,
                  [&](int segment, const float(&acc)[StreamRows<F>::kBlocks][4]) {
#pragma unroll
                    for (int m = 0; m < StreamRows<F>::kBlocks; ++m) {
                      sums.put(slot + segment, warp.is_up ? 1 : 0, 16 * (warp.block + m), acc[m],
                               warp.lane);
                    }
                  });
}

/// NVFP4's decoding needs registers.
template <WeightFormat F, bool kWhole>
using LayerPiece = StreamPiece<F, stream_blocks(F),
                               F == WeightFormat::kNvFp4 ? (kWhole ? 2 : 1) : kSegmentTiles<F>>;

/// store(token, output, sum, sum of the weight `work.up`) for every output that the CTA adds.
template <WeightFormat F, bool kWhole, typename Store>
__device__ __forceinline__ void stream_layer(const StreamTerm& term, const StreamWork& work,
                                             const StreamPlan& plan, const Store& store) {
  constexpr int kBlocks = stream_blocks(F);
  const bool gated = work.up != nullptr;
  const SegmentSums sums(dynamic_smem<float>(), plan, kBlocks, gated ? 2 : 1);
  const StreamWarp warp(plan, gated, kBlocks);
  const TensorShape& shape = term.shape;
  const StreamRows<F> rows(warp.is_up ? work.up : term.weight, shape,
                           work.first_block + warp.block);
  const WarpSegments mine{plan.begin(shape.segments, warp.rank) + warp.k_warp,
                          plan.begin(shape.segments, warp.rank + 1), plan.k_warps};
  LayerPiece<F, kWhole> piece;
  bool loaded = mine.first < mine.end;
  if (loaded) {
    const int tile = mine.first * kSegmentTiles<F>;
    piece.load(rows.rows, tile, shape.k_tiles - tile, warp.lane);
  }
  const float factor = sum_factor<F>(term.weight + shape.scale_2_offset);
  const float up_factor = gated ? sum_factor<F>(work.up + shape.scale_2_offset) : 1.0F;
  sums.wait_for_peers();
  begin_kernel();
  stream_term<F, kWhole>(sums, piece, loaded, rows, term, mine, warp, 0);
  sums.meet();

  const int first = 16 * work.first_block + warp.rank * sums.outputs;
  sums.each(work.tokens, [&](int token, int output) {
    const float up = gated ? sums.total(1, output, token, 0, shape.segments) * up_factor : 0.0F;
    store(token, first + output, sums.total(0, output, token, 0, shape.segments) * factor, up);
  });
}

/// The same of two products with the same outputs: store(token, output, first sum, second sum).
template <WeightFormat F, bool kWhole, typename Store>
__device__ __forceinline__ void stream_two(const StreamTerm& one, const StreamTerm& two,
                                           const StreamWork& work, const StreamPlan& plan,
                                           const Store& store) {
  constexpr int kBlocks = stream_blocks(F);
  const SegmentSums sums(dynamic_smem<float>(), plan, kBlocks, 1);
  const StreamWarp warp(plan, false, kBlocks);
  const StreamRows<F> rows(one.weight, one.shape, work.first_block + warp.block);
  const StreamRows<F> more_rows(two.weight, two.shape, work.first_block + warp.block);
  // Segments of the first product, then of the second, are counted as one row of them.
  const int middle = one.shape.segments;
  const int segments = middle + two.shape.segments;
  const int end = plan.begin(segments, warp.rank + 1);
  WarpSegments mine{plan.begin(segments, warp.rank) + warp.k_warp, min(end, middle), plan.k_warps};
  LayerPiece<F, kWhole> piece;
  bool loaded = mine.first < end;
  if (mine.first < mine.end) {
    const int tile = mine.first * kSegmentTiles<F>;
    piece.load(rows.rows, tile, one.shape.k_tiles - tile, warp.lane);
  } else if (loaded) {
    const int tile = (mine.first - middle) * kSegmentTiles<F>;
    piece.load(more_rows.rows, tile, two.shape.k_tiles - tile, warp.lane);
  }
  const float factor = sum_factor<F>(one.weight + one.shape.scale_2_offset);
  const float more_factor = sum_factor<F>(two.weight + two.shape.scale_2_offset);
  sums.wait_for_peers();
  begin_kernel();
  stream_term<F, kWhole>(sums, piece, loaded, rows, one, mine, warp, 0);
  while (mine.first < middle) {
    mine.first += mine.step;
  }
  stream_term<F, kWhole>(sums, piece, loaded, more_rows, two,
                         {mine.first - middle, end - middle, mine.step}, warp, middle);
  sums.meet();

  const int first = 16 * work.first_block + warp.rank * sums.outputs;
  sums.each(work.tokens, [&](int token, int output) {
    store(token, first + output, sums.total(0, output, token, 0, middle) * factor,
          sums.total(0, output, token, middle, segments) * more_factor);
  });
}

}  // namespace tandem::cuda
