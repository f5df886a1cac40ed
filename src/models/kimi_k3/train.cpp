// train.cpp — the training side of KimiK3: the same forward with its activations kept, and the
// backward.
#include <algorithm>
#include <array>

#include "core/check.h"
#include "core/checked_cast.h"
#include "models/kimi_k3/model.h"
#include "models/kimi_k3/pass.h"
#include "ops/act.h"
#include "ops/embed.h"
#include "tensor/arena_views.h"

namespace tandem::kimi_k3 {

ConstF32Mat KimiK3::forward_train(const ExecCtx& ctx, const TrainBatch& batch, Arena& keep) {
  const SeqBatch seqs{batch.cu_seqlens, {}};
  Pass pass{batch.token_ids, seqs, nullptr, nullptr, batch.routed, &keep, {}, {}, {}, {}};
  const ConstF32Mat hidden = run_layers(ctx, pass);
  saved_ = {std::move(pass.saved), std::move(pass.bank), pass.final_in};
  return hidden;
}

HiddenStates KimiK3::hidden_states() const {
  HiddenStates states;
  for (const LayerSaved& layer : saved_.layers) {
    states.mixer_in.push_back(layer.mixer_in);
    states.ffn_in.push_back(layer.ffn_in);
    states.prefix.push_back(layer.prefix_out);
  }
  return states;
}

void KimiK3::head_backward(const ExecCtx& ctx, F32Mat d_hidden, ConstF32Mat d_logits,
                           ConstF32Mat hidden) {
  lm_head_.backward(ctx, d_hidden, d_logits, hidden, nn::Linear::InputGrad::kAccumulate);
}

/// Gradients travel in two kinds of buffers: d_prefix, the gradient of the running P, and one
/// buffer a bank row, which collects from every later aggregate until the layer that pushed the row
/// takes it over as its d_prefix.
void KimiK3::backward(const ExecCtx& ctx, ConstF32Mat d_hidden, const TrainBatch& batch) {
  TDM_CHECK(embed_master_ != nullptr && !saved_.layers.empty());
  Arena& work = *ctx.workspace;
  const ArenaScope scope(work);
  const std::int64_t rows = d_hidden.size(0);
  const std::int64_t width = config_.hidden_size;
  const auto zeros = [&] {
    const F32Mat m = take_mat(work, rows, width);
    ctx.device->zero(m.data(), usize(m.numel()) * sizeof(float));
    return m;
  };

  BackwardPass pass{
      SeqBatch{batch.cu_seqlens, {}}, {}, saved_.bank, zeros(), take_mat(work, rows, width),
      take_mat(work, rows, width)};
  for (std::size_t row = 0; row < saved_.bank.size(); ++row) {
    pass.d_bank.push_back(zeros());
  }
  norm_.backward(ctx, pass.d_h, d_hidden, saved_.final_in);
  pass.aggregate_backward(ctx, output_attn_res_, saved_.layers.back().prefix_out);

  for (std::size_t index = layers_.size(); index-- > 0;) {
    const Layer& layer = layers_[index];
    const LayerSaved& saved = saved_.layers[index];
    // FFN: P_out = P_mid + ffn(norm(aggregate(P_mid)))
    if (layer.mlp) {
      layer.mlp->backward(ctx, pass.d_x, pass.d_prefix, *saved.mlp,
                          nn::Linear::InputGrad::kOverwrite);
    } else {
      layer.moe->backward(ctx, pass.d_x, pass.d_prefix, *saved.moe);
    }
    layer.post_attention_layernorm.backward(ctx, pass.d_h, pass.d_x, saved.ffn_in);
    pass.aggregate_backward(ctx, layer.mlp_res, saved.prefix_mid);
    // Mixer: P_mid = (P_in or nothing) + mixer(norm(aggregate(P_in)))
    if (layer.kda) {
      layer.kda->backward(ctx, pass.d_x, pass.d_prefix, pass.seqs, *saved.kda);
    } else {
      layer.mla->backward(ctx, pass.d_x, pass.d_prefix, batch.cu_seqlens, *saved.mla);
    }
    layer.input_layernorm.backward(ctx, pass.d_h, pass.d_x, saved.mixer_in);
    if (static_cast<std::int64_t>(index) % config_.attn_res_block_size ==
        0) {  // P_in went into the bank here
      pass.d_prefix = pass.d_bank.back();
      pass.d_bank.pop_back();
      pass.bank.pop_back();
    }
    if (pass.bank.empty()) {  // layer 0: the aggregate of one row is the row
      ops::add(ctx, pass.d_prefix, pass.d_prefix, pass.d_h);
    } else {
      pass.aggregate_backward(ctx, layer.self_attention_res, saved.prefix_in);
    }
  }
  ops::embed_bwd(ctx, embed_master_->grad_mat(), pass.d_prefix, batch.token_ids);
}

void KimiK3::refresh(const ExecCtx& ctx) {
  lm_head_.refresh(ctx);
  for (Layer& layer : layers_) {
    if (layer.kda) {
      nn::Kda& kda = *layer.kda;
      for (nn::Linear* linear : {&kda.q_proj, &kda.k_proj, &kda.v_proj, &kda.g_proj, &kda.f_a_proj,
                                 &kda.f_b_proj, &kda.b_proj, &kda.o_proj}) {
        linear->refresh(ctx);
      }
    } else {
      nn::Mla& mla = *layer.mla;
      for (nn::Linear* linear :
           {&mla.q_a_proj, &mla.q_b_proj, &mla.kv_a_proj, &mla.g_proj, &mla.o_proj}) {
        linear->refresh(ctx);
      }
      mla.refresh(ctx);
    }
    if (layer.mlp) {
      for (nn::Linear* linear :
           {&layer.mlp->gate_proj, &layer.mlp->up_proj, &layer.mlp->down_proj}) {
        linear->refresh(ctx);
      }
    } else {
      layer.moe->refresh(ctx);
    }
  }
}

}  // namespace tandem::kimi_k3
