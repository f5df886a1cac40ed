// mla-inl.h — the two register tiles of MLA: dot products of query rows with key rows, and weighted
// sums of value rows; and the online softmax over one tile of keys.
//
// One order for every value: a dot product has one accumulator a lane over the row (lane = channel
// mod lanes) and one tree at the end; a weighted sum is one chain over keys in order of position;
// the softmax sum has lane = key mod lanes. Tiles of kKeyTile keys start at position 0 of the
// sequence. Which rows or keys share a register tile never enters a result.

#if defined(TANDEM_BACKENDS_CPU_MLA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_BACKENDS_CPU_MLA_INL_H_
#undef TANDEM_BACKENDS_CPU_MLA_INL_H_
#else
#define TANDEM_BACKENDS_CPU_MLA_INL_H_
#endif

#include <limits>

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

/// o_i += sum_j p_ij y_j, row i over its first valid[i] keys; p is [rows, kKeyTile], o rows are
/// padded to whole vectors.
inline void sum_rows(float* o, std::int64_t o_stride, std::int64_t rows, const float* p,
                     const float* const* y, const std::int64_t* valid, std::int64_t cols) {
  for (std::int64_t col = 0; col < cols; col += kTileCols * kLanes) {
    std::int64_t i = 0;
    for (; i + kTileRows <= rows; i += kTileRows) {
      const std::int64_t shared = *std::min_element(valid + i, valid + i + kTileRows);
      sum_cols<kTileRows>(o + i * o_stride, o_stride, p + i * kKeyTile, kKeyTile, y, shared, col,
                          cols);
      for (std::int64_t r = i; r < i + kTileRows; ++r) {
        if (valid[r] > shared) {
          sum_cols<1>(o + r * o_stride, o_stride, p + r * kKeyTile + shared, kKeyTile, y + shared,
                      valid[r] - shared, col, cols);
        }
      }
    }
    for (; i < rows; ++i) {
      sum_cols<1>(o + i * o_stride, o_stride, p + i * kKeyTile, kKeyTile, y, valid[i], col, cols);
    }
  }
}

/// The running softmax of one row.
struct SoftmaxRow {
  float top = -std::numeric_limits<float>::infinity();
  alignas(64) float sum[kLanes] = {};  // lane = key mod lanes
};

/// Scores s[0..valid) of one tile become weights e^(scale s - top) (0 after `valid` up to the end
/// of the vector); returns what the sums so far must be multiplied by (1 when top did not move).
HWY_INLINE float softmax_tile(float* s, std::int64_t valid, float scale, SoftmaxRow& row) {
  const FloatTag d;
  const FloatVec low = hn::Set(d, -std::numeric_limits<float>::infinity());
  const FloatVec factor = hn::Set(d, scale);
  FloatVec top = low;
  for (std::int64_t j = 0; j < valid; j += kLanes) {
    const auto live = hn::FirstN(d, static_cast<std::size_t>(std::min(kLanes, valid - j)));
    const FloatVec x = hn::IfThenElse(live, hn::Mul(factor, hn::LoadU(d, s + j)), low);
    hn::StoreU(x, d, s + j);
    top = hn::Max(top, x);
  }
  const float new_top = std::max(row.top, hn::GetLane(hn::MaxOfLanes(d, top)));
  const float correction =
      new_top == row.top ? 1.0F : hn::GetLane(exp_vec(hn::Set(d, row.top - new_top)));
  FloatVec sum = hn::Mul(hn::Load(d, row.sum), hn::Set(d, correction));
  for (std::int64_t j = 0; j < valid; j += kLanes) {
    const auto live = hn::FirstN(d, static_cast<std::size_t>(std::min(kLanes, valid - j)));
    const FloatVec p =
        hn::IfThenElseZero(live, exp_vec(hn::Sub(hn::LoadU(d, s + j), hn::Set(d, new_top))));
    hn::StoreU(p, d, s + j);
    sum = hn::Add(sum, p);
  }
  hn::Store(sum, d, row.sum);
  row.top = new_top;
  return correction;
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
