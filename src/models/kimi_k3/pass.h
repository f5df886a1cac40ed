// pass.h — the running state of one forward and of one backward through the layers; private to this
// folder.
#pragma once

#include <vector>

#include "models/kimi_k3/model.h"

namespace tandem::kimi_k3 {

/// The inputs and running state of one forward. P is the prefix sum of the current block, the bank
/// holds the closed rows (kimi-k3.md 2.1); both live for one pass only.
struct KimiK3::Pass {
  ConstI32Vec token_ids;
  SeqBatch seqs;
  const ModelBatch* batch = nullptr;    // null in training
  const CacheBuffers* cache = nullptr;  // null in training
  RoutedExperts* routed = nullptr;
  Arena* keep = nullptr;

  std::vector<ConstF32Mat> bank;
  F32Mat prefix;
  std::vector<LayerSaved> saved;
  ConstF32Mat final_in;  // the last aggregate; in training

  [[nodiscard]] bool training() const { return cache == nullptr; }
  [[nodiscard]] std::int64_t num_rows() const { return token_ids.size(0); }
  [[nodiscard]] std::vector<ConstF32Mat> sources() const {
    std::vector<ConstF32Mat> all = bank;
    all.push_back(prefix);
    return all;
  }
};

/// The running state of one backward. `bank` shrinks as the layers that pushed its rows are passed.
struct BackwardPass {
  SeqBatch seqs;
  std::vector<F32Mat> d_bank;
  std::vector<ConstF32Mat> bank;
  F32Mat d_prefix;  // gradient of the running P
  F32Mat d_h;       // gradient of an aggregate
  F32Mat d_x;       // gradient of a normed input

  /// d_bank, d_prefix += gradients of AttnRes(bank, prefix) under d_h.
  void aggregate_backward(const ExecCtx& ctx, const nn::AttnRes& site, ConstF32Mat prefix) const {
    std::vector<ConstF32Mat> sources = bank;
    std::vector<F32Mat> d_sources = d_bank;
    sources.push_back(prefix);
    d_sources.push_back(d_prefix);
    site.backward(ctx, d_sources, d_h, sources);
  }
};

}  // namespace tandem::kimi_k3
