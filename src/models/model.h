// model.h — what the engine and the trainer know of a model.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/arena.h"
#include "models/cache_spec.h"
#include "nn/parameter.h"
#include "ops/exec_ctx.h"
#include "ops/seq_batch.h"

namespace tandem {

/// One engine step: a flat batch of token rows, prefill and decode mixed. All views belong to the
/// caller for the call.
struct ModelBatch {
  ConstI32Vec token_ids;  // [T]
  SeqBatch seqs;          // cu_seqlens [B+1], state_slots [B]
  ConstI32Vec kv_lens;    // [B] tokens of the sequence after this call (cached + new); 0 = padding
  ConstI32Vec slot_mapping;  // [T] page * page_size + offset of each new token; -1 = padding
  ConstI32Mat page_table;    // [B, max_pages]; unused entries -1
  ConstI32Vec logit_rows;    // [R] rows of the batch whose logits are wanted
};

/// Expert ids of every MoE layer, [T, moe_layers * top_k] int32: written by a forward, or read when
/// `replay` (R3).
struct RoutedExperts {
  I32Mat ids;
  bool replay = false;
};

/// A packed training batch: whole sequences, no caches.
struct TrainBatch {
  ConstI32Vec token_ids;   // [T]
  ConstI32Vec cu_seqlens;  // [B+1]
  RoutedExperts* routed = nullptr;
};

/// Bytes a model occupies and reads, for `inspect`, the memory plan and the bandwidth roof.
struct ModelFootprint {
  std::int64_t num_parameters = 0;
  std::int64_t num_active_parameters = 0;  // used by one token, without the embedding table
  std::int64_t weight_bytes = 0;           // resident packed weights
  std::int64_t decode_read_bytes = 0;      // weight bytes one token of batch 1 reads
  std::int64_t expert_bytes = 0;           // of weight_bytes, all routed experts of all layers
  std::int64_t num_experts = 0;            // a layer
};

class Model {
 public:
  Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  virtual ~Model() = default;

  [[nodiscard]] virtual const CacheSpec& cache_spec() const = 0;
  [[nodiscard]] virtual std::int64_t vocab_size() const = 0;
  [[nodiscard]] virtual std::int64_t moe_layers() const = 0;
  [[nodiscard]] virtual std::int64_t experts_per_token() const = 0;
  [[nodiscard]] virtual ModelFootprint footprint() const = 0;

  /// logits [R, V] of the rows in batch.logit_rows; caches advance by the batch's tokens. `routed`
  /// may be null.
  virtual void forward(const ExecCtx& ctx, F32Mat logits, const ModelBatch& batch,
                       const CacheBuffers& cache, RoutedExperts* routed) const = 0;

  // --- training; only when loaded trainable
  // -------------------------------------------------------------------------
  [[nodiscard]] virtual nn::ParameterStore& parameters() = 0;
  /// Re-derives packed weights after the optimizer changed the masters.
  virtual void refresh(const ExecCtx& ctx) = 0;
  /// hidden [T, D]: the normed output the head reads. What the backward needs stays in `keep` until
  /// it is rewound.
  virtual ConstF32Mat forward_train(const ExecCtx& ctx, const TrainBatch& batch, Arena& keep) = 0;
  /// Logits of some hidden rows: the very routine forward() uses.
  virtual void head(const ExecCtx& ctx, F32Mat logits, ConstF32Mat hidden) const = 0;
  /// d_hidden += d_logits W and the head's own gradient, for rows given to head().
  virtual void head_backward(const ExecCtx& ctx, F32Mat d_hidden, ConstF32Mat d_logits,
                             ConstF32Mat hidden) = 0;
  /// Gradients of every parameter from d_hidden [T, D], for the last forward_train().
  virtual void backward(const ExecCtx& ctx, ConstF32Mat d_hidden, const TrainBatch& batch) = 0;
};

}  // namespace tandem
