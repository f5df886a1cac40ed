// attn_tiles-inl.h — the two register tiles of MLA and chunkwise KDA: dot products of rows with
// rows, and weighted sums of rows.
//
// One order for every value: a dot product has one accumulator a lane over the row (lane = channel
// mod lanes) and one tree at the end; a weighted sum is one chain in order of the summed rows.
// Which rows share a register tile never enters a result.

#if defined(TANDEM_BACKENDS_CPU_ATTN_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_BACKENDS_CPU_ATTN_TILES_INL_H_
#undef TANDEM_BACKENDS_CPU_ATTN_TILES_INL_H_
#else
#define TANDEM_BACKENDS_CPU_ATTN_TILES_INL_H_
#endif

#include <algorithm>

#include "backends/cpu/attn_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {

inline constexpr std::int64_t kKeyTile = 64;
inline constexpr std::int64_t kTileCols = 4;  // keys of a dot tile; vectors of a weighted-sum tile
// Rows of either tile: 4 x 4 accumulators need 32 registers.
inline constexpr std::int64_t kTileRows = kLanes >= 16 ? 4 : 2;

/// s[i * s_stride + j] = x_i . y_j over `dim` channels; i < R rows x + i * x_stride (padded with
/// zeros to whole vectors), j < 4 rows of `y`.
template <std::int64_t R>
HWY_INLINE void dot_tile(const float* x, std::int64_t x_stride, const float* const* y,
                         std::int64_t dim, float* s, std::int64_t s_stride) {
  const FloatTag d;
  FloatVec acc[usize(R)][usize(kTileCols)];
  for (std::int64_t i = 0; i < R; ++i) {
    for (std::int64_t j = 0; j < kTileCols; ++j) {
      acc[i][j] = hn::Zero(d);
    }
  }
  std::int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    FloatVec key[usize(kTileCols)];
    for (std::int64_t j = 0; j < kTileCols; ++j) {
      key[j] = hn::LoadU(d, y[j] + c);
    }
    for (std::int64_t i = 0; i < R; ++i) {
      const FloatVec row = hn::Load(d, x + i * x_stride + c);
      for (std::int64_t j = 0; j < kTileCols; ++j) {
        acc[i][j] = hn::MulAdd(row, key[j], acc[i][j]);
      }
    }
  }
  if (c < dim) {
    for (std::int64_t j = 0; j < kTileCols; ++j) {
      const FloatVec key = load_first(y[j] + c, dim - c);
      for (std::int64_t i = 0; i < R; ++i) {
        acc[i][j] = hn::MulAdd(hn::Load(d, x + i * x_stride + c), key, acc[i][j]);
      }
    }
  }
  for (std::int64_t i = 0; i < R; ++i) {
    sum_lanes_4(acc[i][0], acc[i][1], acc[i][2], acc[i][3], s + i * s_stride);
  }
}

/// Scores of `rows` query rows against `keys` <= kKeyTile keys; s is [rows, kKeyTile].
HWY_INLINE void dot_rows(const float* x, std::int64_t x_stride, std::int64_t rows,
                         const float* const* y, std::int64_t keys, std::int64_t dim, float* s) {
  for (std::int64_t j = 0; j < keys; j += kTileCols) {
    const float* quad[kTileCols];  // past the end: the last key again, its scores are not used
    for (std::int64_t i = 0; i < kTileCols; ++i) {
      quad[i] = y[std::min(j + i, keys - 1)];
    }
    std::int64_t i = 0;
    for (; i + kTileRows <= rows; i += kTileRows) {
      dot_tile<kTileRows>(x + i * x_stride, x_stride, quad, dim, s + i * kKeyTile + j, kKeyTile);
    }
    for (; i < rows; ++i) {
      dot_tile<1>(x + i * x_stride, x_stride, quad, dim, s + i * kKeyTile + j, kKeyTile);
    }
  }
}

/// o_i += sum_j p[i * p_stride + j] y_j over `keys` keys in order, on NV vectors of columns from
/// `col`; `cols` bounds the columns read from y (the last vector may be partial when NV is 1).
template <std::int64_t R, std::int64_t NV>
HWY_INLINE void sum_tile(float* o, std::int64_t o_stride, const float* p, std::int64_t p_stride,
                         const float* const* y, std::int64_t keys, std::int64_t col,
                         std::int64_t cols) {
  const FloatTag d;
  FloatVec acc[usize(R)][usize(NV)];
  for (std::int64_t i = 0; i < R; ++i) {
    for (std::int64_t v = 0; v < NV; ++v) {
      acc[i][v] = hn::Load(d, o + i * o_stride + col + v * kLanes);
    }
  }
  for (std::int64_t j = 0; j < keys; ++j) {
    FloatVec value[usize(NV)];
    for (std::int64_t v = 0; v < NV; ++v) {
      const float* at = y[j] + col + v * kLanes;
      value[v] = NV == 1 ? load_first(at, cols - col) : hn::LoadU(d, at);
    }
    for (std::int64_t i = 0; i < R; ++i) {
      const FloatVec weight = hn::Set(d, p[i * p_stride + j]);
      for (std::int64_t v = 0; v < NV; ++v) {
        acc[i][v] = hn::MulAdd(weight, value[v], acc[i][v]);
      }
    }
  }
  for (std::int64_t i = 0; i < R; ++i) {
    for (std::int64_t v = 0; v < NV; ++v) {
      hn::Store(acc[i][v], d, o + i * o_stride + col + v * kLanes);
    }
  }
}

template <std::int64_t R>
HWY_INLINE void sum_cols(float* o, std::int64_t o_stride, const float* p, std::int64_t p_stride,
                         const float* const* y, std::int64_t keys, std::int64_t col,
                         std::int64_t cols) {
  if (col + kTileCols * kLanes <= cols) {
    sum_tile<R, kTileCols>(o, o_stride, p, p_stride, y, keys, col, cols);
    return;
  }
  for (; col < cols; col += kLanes) {
    sum_tile<R, 1>(o, o_stride, p, p_stride, y, keys, col, cols);
  }
}

/// o_i += sum_j p_ij y_j, row i over its first valid[i] keys; p is [rows, p_stride], o rows are
/// padded to whole vectors.
inline void sum_rows(float* o, std::int64_t o_stride, std::int64_t rows, const float* p,
                     std::int64_t p_stride, const float* const* y, const std::int64_t* valid,
                     std::int64_t cols) {
  for (std::int64_t col = 0; col < cols; col += kTileCols * kLanes) {
    std::int64_t i = 0;
    for (; i + kTileRows <= rows; i += kTileRows) {
      const std::int64_t shared = *std::min_element(valid + i, valid + i + kTileRows);
      sum_cols<kTileRows>(o + i * o_stride, o_stride, p + i * p_stride, p_stride, y, shared, col,
                          cols);
      for (std::int64_t r = i; r < i + kTileRows; ++r) {
        if (valid[r] > shared) {
          sum_cols<1>(o + r * o_stride, o_stride, p + r * p_stride + shared, p_stride, y + shared,
                      valid[r] - shared, col, cols);
        }
      }
    }
    for (; i < rows; ++i) {
      sum_cols<1>(o + i * o_stride, o_stride, p + i * p_stride, p_stride, y, valid[i], col, cols);
    }
  }
}

HWY_INLINE void scale_row(float* x, std::int64_t padded_cols, float factor) {
  const FloatTag d;
  for (std::int64_t c = 0; c < padded_cols; c += kLanes) {
    hn::Store(hn::Mul(hn::Load(d, x + c), hn::Set(d, factor)), d, x + c);
  }
}

/// Copies a row into a buffer padded with zeros to whole vectors.
HWY_INLINE void copy_padded(const float* from, std::int64_t cols, float* to) {
  const FloatTag d;
  for (std::int64_t c = 0; c < cols; c += kLanes) {
    hn::Store(load_first(from + c, cols - c), d, to + c);
  }
}

}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
