// kda_step.cuh — one token of the KDA recurrence on a warp's columns: the law that prefill, decode
// and training share, whatever their blocks.   Contract: ops/kda.h
// Who holds what   Lane 4 g + j is lane j of row group g: of every 32 rows of the state it holds
// the
//           four from 4 g on, of columns kColumns j .. + kColumns - 1 of the warp. Rows beyond K
//           are zeros and stay so.
// Sums over k      A lane sums its rows in four chains (k mod 4), rising, adds these in pairs; then
//           the row groups in a butterfly of distance 1, 2, 4. kColumns does not appear in it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "backends/cuda/kda/choose_kda.h"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/quad.cuh"
#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {

constexpr int kRowGroups = 8;
constexpr int kColumnLanes = kWarp / kRowGroups;
static_assert(kColumnLanes == kColumnLanesOfWarp);
constexpr int kRowsOfQuads = kRowGroups * kQuad;  // rows that a quad of every group covers

/// Quads of rows a lane, for K keys.
[[nodiscard]] constexpr int state_quads(std::int64_t keys) {
  return static_cast<int>((keys + kRowsOfQuads - 1) / kRowsOfQuads);
}

__device__ __forceinline__ int row_group() {
  return static_cast<int>(threadIdx.x) % kWarp / kColumnLanes;
}
__device__ __forceinline__ int column_lane() {
  return static_cast<int>(threadIdx.x) % kColumnLanes;
}

/// What a lane holds of a vector over k.
template <int kQuads>
struct RowValues {
  float x[kQuads][kQuad];
};

/// What a lane holds of the state.
template <int kQuads, int kColumns>
struct StateTile {
  float s[kQuads][kQuad][kColumns];
};

/// Where in shared memory the lane's rows of the vector at `vector` begin: of kQuads * 32 floats,
/// zeros beyond K, aligned to 16 bytes.
__device__ __forceinline__ std::uint32_t lane_rows(std::uint32_t vector) {
  return vector + static_cast<std::uint32_t>(row_group()) * sizeof(float4);
}

template <int kQuads>
__device__ __forceinline__ RowValues<kQuads> read_rows(std::uint32_t rows) {
  constexpr std::uint32_t kStride = kRowsOfQuads * sizeof(float);
  RowValues<kQuads> values;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const float4 x = ptx::load_shared_16(rows + static_cast<std::uint32_t>(j) * kStride);
    values.x[j][0] = x.x;
    values.x[j][1] = x.y;
    values.x[j][2] = x.z;
    values.x[j][3] = x.w;
  }
  return values;
}

template <int kQuads>
__device__ __forceinline__ RowValues<kQuads> product(const RowValues<kQuads>& a,
                                                     const RowValues<kQuads>& b) {
  RowValues<kQuads> rows;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      rows.x[j][i] = a.x[j][i] * b.x[j][i];
    }
  }
  return rows;
}

/// dot[c] = the sum over the lane's rows of S[k, c] by[k].
template <int kQuads, int kColumns>
__device__ __forceinline__ void lane_dot(float (&dot)[kColumns],
                                         const StateTile<kQuads, kColumns>& tile,
                                         const RowValues<kQuads>& by) {
  float chain[kQuad][kColumns] = {};
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        chain[i][c] = fmaf(tile.s[j][i][c], by.x[j][i], chain[i][c]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    dot[c] = (chain[0][c] + chain[1][c]) + (chain[2][c] + chain[3][c]);
  }
}

/// The same sums of the group at `distance` 1, 2 or 4. All lanes call.
template <int kColumns>
__device__ __forceinline__ void from_group(float (&theirs)[kColumns], const float (&x)[kColumns],
                                           int distance) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    theirs[c] = __shfl_xor_sync(kFullWarp, x[c], distance * kColumnLanes);
  }
}
template <int kColumns>
__device__ __forceinline__ void add(float (&x)[kColumns], const float (&y)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    x[c] += y[c];
  }
}
/// Sums over the row groups; every group gets them. All lanes call.
template <int kColumns>
__device__ __forceinline__ void sum_groups(float (&x)[kColumns]) {
  float theirs[kColumns];
#pragma unroll
  for (int distance = 1; distance < kRowGroups; distance *= 2) {
    from_group(theirs, x, distance);
    add(x, theirs);
  }
}

/// S <- diag(by) S.
template <int kQuads, int kColumns>
__device__ __forceinline__ void decay(StateTile<kQuads, kColumns>& tile,
                                      const RowValues<kQuads>& by) {
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        tile.s[j][i][c] *= by.x[j][i];
      }
    }
  }
}

/// S <- S + k u^T.
template <int kQuads, int kColumns>
__device__ __forceinline__ void add_outer(StateTile<kQuads, kColumns>& tile,
                                          const RowValues<kQuads>& k, const float (&u)[kColumns]) {
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        tile.s[j][i][c] = fmaf(k.x[j][i], u[c], tile.s[j][i][c]);
      }
    }
  }
}

/// u = beta (v - S^T (e k)): what the token writes. `dot` is the sum over k of S (e k), the state
/// being the one before its decay: the decay is then off the path from one token to the next.
template <int kColumns>
__device__ __forceinline__ void written(float (&u)[kColumns], const float (&v)[kColumns],
                                        const float (&dot)[kColumns], float beta) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    u[c] = beta * (v[c] - dot[c]);
  }
}

/// lane_rows() of a token's vectors over k.
struct TokenRows {
  std::uint32_t q;
  std::uint32_t k;
  std::uint32_t e;  // e^g
};

/// One token, start to end; o = S^T q in every row group. The rows of k and e are read twice rather
/// than held.
template <int kQuads, int kColumns>
__device__ __forceinline__ void token_step(StateTile<kQuads, kColumns>& tile,
                                           const TokenRows& token, float beta,
                                           const float (&v)[kColumns], float (&o)[kColumns]) {
  float dot[kColumns];
  lane_dot(dot, tile, product(read_rows<kQuads>(token.e), read_rows<kQuads>(token.k)));
  sum_groups(dot);
  float u[kColumns];
  written(u, v, dot, beta);
  __syncwarp();  // so that they are read again
  decay(tile, read_rows<kQuads>(token.e));
  add_outer(tile, read_rows<kQuads>(token.k), u);
  lane_dot(o, tile, read_rows<kQuads>(token.q));
  sum_groups(o);
}

/// kColumns adjacent floats; aligned to their size.
template <int kColumns>
struct Columns;
template <>
struct Columns<1> {
  using Vector = float;
};
template <>
struct Columns<2> {
  using Vector = float2;
};
template <>
struct Columns<4> {
  using Vector = float4;
};

/// A lane's columns of a vector over v, at `at` in shared memory.
template <int kColumns>
__device__ __forceinline__ void read_columns(float (&x)[kColumns], std::uint32_t at) {
  if constexpr (kColumns == 4) {
    const float4 v = ptx::load_shared_16(at);
    memcpy(x, &v, sizeof(v));
  } else if constexpr (kColumns == 2) {
    const float2 v = ptx::load_shared_8(at);
    memcpy(x, &v, sizeof(v));
  } else {
    x[0] = ptx::load_shared_4(at);
  }
}

/// fn(j, i, offset) for element i of the lane's quad j, `offset` floats behind the lane's first row
/// in a state of `values` columns. Rows from `keys` on are left out.
template <int kQuads, typename Fn>
__device__ __forceinline__ void each_row(int keys, int values, const Fn& fn) {
  const auto rows = [&](auto whole) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const int below = j * kRowsOfQuads + i;
        if (whole || below + row_group() * kQuad < keys) {
          fn(j, i, std::int64_t{values} * below);
        }
      }
    }
  };
  if (keys == kQuads * kRowsOfQuads) {
    rows(std::true_type{});
  } else {
    rows(std::false_type{});
  }
}

/// Where the lane's first row lies in a state [K, V] whose row 0 has the lane's columns at `state`.
template <typename T>
__device__ __forceinline__ T* first_row(T* state, int values) {
  return state + std::int64_t{values} * (row_group() * kQuad);
}

/// `from` is the lane's first_row(); null: zeros. Streaming: no state is read twice from L2.
template <int kQuads, int kColumns>
__device__ __forceinline__ void load_state(StateTile<kQuads, kColumns>& tile, const float* from,
                                           int keys, int values) {
  using Vector = typename Columns<kColumns>::Vector;
  tile = {};
  if (from != nullptr) {
    each_row<kQuads>(keys, values, [&](int j, int i, std::int64_t offset) {
      const Vector x = __ldcs(reinterpret_cast<const Vector*>(from + offset));
      memcpy(tile.s[j][i], &x, sizeof(x));
    });
  }
}

/// `to` is the lane's first_row().
template <int kQuads, int kColumns>
__device__ __forceinline__ void store_state(const StateTile<kQuads, kColumns>& tile, float* to,
                                            int keys, int values) {
  using Vector = typename Columns<kColumns>::Vector;
  each_row<kQuads>(keys, values, [&](int j, int i, std::int64_t offset) {
    Vector x;
    memcpy(&x, tile.s[j][i], sizeof(x));
    __stcs(reinterpret_cast<Vector*>(to + offset), x);
  });
}

/// o[c] for c = row group: so that a warp's columns are stored by one instruction.
template <int kColumns>
__device__ __forceinline__ float own_column(const float (&o)[kColumns]) {
  float mine = o[0];
#pragma unroll
  for (int c = 1; c < kColumns; ++c) {
    mine = row_group() == c ? o[c] : mine;
  }
  return mine;
}

}  // namespace tandem::cuda
