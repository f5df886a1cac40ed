// mla.h — multi-head latent attention without positions (NoPE), absorbed over a paged latent cache,
// and the expanded reference form.   Source: kimi-k3.md 5.
//
// A cache row is [ c (DL, after kv_a_layernorm) | k_s (DR) ] in one of the formats of
// tensor/latent_rows.h; attention is that over the values the rows hold. Determinism: for one query
// row, scores, the softmax sum and the weighted sum run in one fixed order that depends on the
// number of its keys and the row format alone, so neither paging, nor batch, nor the split of a
// prompt matters.
#pragma once

#include "ops/exec_ctx.h"
#include "tensor/latent_rows.h"
#include "tensor/view.h"

namespace tandem {

/// Absorbed queries, or their gradients, in two parts that lie where their producers left them.
template <typename T>
struct MlaQueryParts {
  TensorView<T, 3> latent;  // [T, H, DL] q_lat
  TensorView<T, 3> shared;  // [T, H, DR] q_s

  operator MlaQueryParts<const T>() const  // NOLINT(google-explicit-constructor)
      requires(!std::is_const_v<T>) {
    return {latent, shared};
  }
};
using MlaQuery = MlaQueryParts<const float>;
using MlaQueryGrad = MlaQueryParts<float>;

/// Where the keys of each sequence are.
struct MlaCacheView {
  ConstLatentRows rows;    // [pages * page_size] of DL + DR elements
  ConstI32Mat page_table;  // [B, max_pages]; key j of sequence b is row page_table[b, j /
                           // page_size] * page_size + j % page_size
  std::int64_t page_size = 1;

  /// Without a page table (and then without kv_lens) the keys of a sequence are its own rows of the
  /// batch, key j in row cu_seqlens[b] + j, in fp32: training, where nothing is cached.
  [[nodiscard]] bool is_batch() const { return page_table.size(0) == 0; }
};

struct MlaBatch {
  ConstI32Vec cu_seqlens;  // [B+1] query rows
  ConstI32Vec kv_lens;  // [B] keys of sequence b visible to its last query row (cached rows + the
                        // rows of this call). Query row i of n sees the first kv_lens[b] - (n - 1 -
                        // i) keys; 0 for a padding sequence: zero output
};

/// What stands between the projections and the attention. Any of the three outputs may be empty.
struct MlaPrepare {
  F32Mat cq;                 // [T, DQ] = rms_norm(cq_raw)
  F32Mat kv;                 // [T, DL+DR] = [ rms_norm(c') | k_s ], for training
  LatentRows rows;           // rows[slot_mapping[t]] = kv[t]
  ConstF32Mat cq_raw;        // [T, DQ]
  ConstF32Vec q_weight;      // [DQ]
  ConstF32Mat kv_raw;        // [T, DL+DR] = [ c' | k_s ]
  ConstF32Vec kv_weight;     // [DL]
  ConstI32Vec slot_mapping;  // [T]; slot -1 is skipped
  float q_eps = 0;
  float kv_eps = 0;
};

struct MlaOps {
  void (*prepare)(const ExecCtx&, const MlaPrepare&);
  void (*store)(const ExecCtx&, const LatentRows& rows, ConstF32Mat kv, ConstI32Vec slot_mapping);
  void (*absorbed)(const ExecCtx&, F32Cube o_lat, F32Mat lse, const MlaQuery& q,
                   const MlaCacheView& cache, const MlaBatch& batch, float scale);
  void (*absorbed_bwd)(const ExecCtx&, const MlaQueryGrad& d_q, F32Mat d_kv, ConstF32Cube d_o_lat,
                       const MlaQuery& q, ConstF32Mat kv, ConstF32Cube o_lat, ConstF32Mat lse,
                       ConstI32Vec cu_seqlens, float scale);
  void (*expanded)(const ExecCtx&, F32Cube o, ConstF32Cube q, ConstF32Cube k_nope,
                   ConstF32Mat k_shared, ConstF32Cube v, ConstI32Vec cu_seqlens, float scale);
};

namespace ops {

/// The same bits as rms_norm() of both, a copy of the shared channels, and mla_store().
void mla_prepare(const ExecCtx& ctx, const MlaPrepare& args);

/// rows[slot_mapping[t]] = kv[t], rounded to the rows' format; slot -1 is skipped.
/// Shapes: kv [T, DL+DR]; slot_mapping [T].
void mla_store(const ExecCtx& ctx, const LatentRows& rows, ConstF32Mat kv,
               ConstI32Vec slot_mapping);

/// o_lat[t, h] = sum_j softmax_j(scale q[t, h] . row_j) c_j over the visible keys.
/// Shapes: o_lat [T, H, DL]; lse [T, H] (log of the softmax sum, natural, including the max) or an
///         empty view when not needed.
void mla_absorbed(const ExecCtx& ctx, F32Cube o_lat, F32Mat lse, const MlaQuery& q,
                  const MlaCacheView& cache, const MlaBatch& batch, float scale);
/// Training batches only: the keys of a sequence are its own rows of `kv` [T, DL+DR]. d_q, d_kv are
/// overwritten.
void mla_absorbed_bwd(const ExecCtx& ctx, const MlaQueryGrad& d_q, F32Mat d_kv,
                      ConstF32Cube d_o_lat, const MlaQuery& q, ConstF32Mat kv, ConstF32Cube o_lat,
                      ConstF32Mat lse, ConstI32Vec cu_seqlens, float scale);

/// The form of kimi-k3.md 5.1 on expanded keys and values, without a cache.
/// Shapes: q [T, H, DN+DR]; k_nope [T, H, DN]; k_shared [T, DR]; v, o [T, H, V].
void mla_expanded(const ExecCtx& ctx, F32Cube o, ConstF32Cube q, ConstF32Cube k_nope,
                  ConstF32Mat k_shared, ConstF32Cube v, ConstI32Vec cu_seqlens, float scale);

}  // namespace ops
}  // namespace tandem
