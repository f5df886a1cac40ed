#include "models/kimi_k3/model.h"

#include "models/kimi_k3/pass.h"
#include "ops/embed.h"
#include "tensor/arena_views.h"

namespace tandem::kimi_k3 {

void KimiK3::run_mixer(const ExecCtx& ctx, const Layer& layer, F32Mat y, ConstF32Mat base,
                       ConstF32Mat x, Pass& pass, LayerSaved& saved) const {
  if (layer.kda) {
    nn::KdaCacheView view;
    if (!pass.training()) {
      const StateBuffer& buffer = pass.cache->state_layers[layer.cache_index];
      const StateSpec& spec = cache_spec_.state_layers[layer.cache_index];
      view = {{buffer.states, pass.cache->num_slots, spec.num_heads, spec.key_dim, spec.value_dim},
              buffer.conv};
    }
    saved.kda = layer.kda->forward(ctx, y, base, x, pass.seqs, pass.training() ? nullptr : &view,
                                   *pass.keep);
    return;
  }
  nn::MlaCacheUse use;
  if (!pass.training()) {
    use = {pass.cache->latent_layers[layer.cache_index],
           pass.batch->page_table,
           pass.cache->page_size,
           pass.batch->slot_mapping,
           {pass.seqs.cu_seqlens, pass.batch->kv_lens}};
  }
  saved.mla = layer.mla->forward(ctx, y, base, x, pass.seqs.cu_seqlens,
                                 pass.training() ? nullptr : &use, *pass.keep);
}

void KimiK3::run_ffn(const ExecCtx& ctx, const Layer& layer, F32Mat y, ConstF32Mat base,
                     ConstF32Mat x, Pass& pass, LayerSaved& saved) const {
  if (layer.mlp) {
    saved.mlp = layer.mlp->forward(ctx, y, base, x, pass.training(), *pass.keep);
    return;
  }
  nn::Routing routing;
  if (pass.routed != nullptr) {
    const std::int64_t top_k = config_.num_experts_per_token;
    routing = {pass.routed->ids.cols(layer.moe_index * top_k, top_k), pass.routed->replay};
  }
  saved.moe = layer.moe->forward(ctx, y, base, x, pass.routed != nullptr ? &routing : nullptr,
                                 pass.training(), *pass.keep);
}

/// One layer of kimi-k3.md 2.2. In training every P is kept (the backward reads them); in inference
/// P is updated in place and all else is dropped at the end of each sub-layer.
void KimiK3::run_layer(const ExecCtx& ctx, const Layer& layer, std::int64_t index,
                       Pass& pass) const {
  Arena& keep = *pass.keep;
  const std::int64_t rows = pass.num_rows();
  const std::int64_t width = config_.hidden_size;
  LayerSaved& saved = pass.saved.emplace_back();
  saved.prefix_in = pass.prefix;
  const bool push = index % config_.attn_res_block_size == 0;

  // Only the backward reads an aggregate itself.
  const auto take_aggregate = [&] {
    return pass.training() ? take_mat(keep, rows, width) : F32Mat{};
  };
  // P <- P + sub-layer, or the sub-layer's output when P is empty.
  const auto sub_layer = [&](bool prefix_is_empty, auto&& add_to) {
    const F32Mat next =
        prefix_is_empty || pass.training() ? take_mat(keep, rows, width) : pass.prefix;
    const Arena::Mark mark = keep.mark();
    add_to(next, prefix_is_empty ? ConstF32Mat{} : ConstF32Mat(pass.prefix));
    pass.prefix = next;
    if (!pass.training()) {
      keep.rewind(mark);
    }
  };
  sub_layer(push, [&](F32Mat y, ConstF32Mat base) {
    const F32Mat x = take_mat(keep, rows, width);
    if (pass.bank.empty()) {  // the aggregate of one row is the row
      saved.mixer_in = pass.prefix;
      layer.input_layernorm.forward(ctx, x, pass.prefix);
    } else {
      const F32Mat h = take_aggregate();
      layer.self_attention_res.forward(ctx, h, x, pass.sources(), layer.input_layernorm);
      saved.mixer_in = h;
    }
    if (push) {  // the row stored is P, not h, and after h was computed
      pass.bank.push_back(pass.prefix);
    }
    run_mixer(ctx, layer, y, base, x, pass, saved);
  });
  saved.prefix_mid = pass.prefix;
  sub_layer(false, [&](F32Mat y, ConstF32Mat base) {
    const F32Mat h = take_aggregate();
    const F32Mat x = take_mat(keep, rows, width);
    layer.mlp_res.forward(ctx, h, x, pass.sources(), layer.post_attention_layernorm);
    saved.ffn_in = h;
    run_ffn(ctx, layer, y, base, x, pass, saved);
  });
  saved.prefix_out = pass.prefix;
}

/// All layers, the last aggregate and the final norm; returns what the head wants.
ConstF32Mat KimiK3::run_layers(const ExecCtx& ctx, Pass& pass) const {
  const F32Mat embedded = take_mat(*pass.keep, pass.num_rows(), config_.hidden_size);
  ops::embed(ctx, embedded, embed_, pass.token_ids);
  pass.prefix = embedded;
  pass.saved.reserve(layers_.size());
  for (std::size_t index = 0; index < layers_.size(); ++index) {
    run_layer(ctx, layers_[index], static_cast<std::int64_t>(index), pass);
  }
  const F32Mat hidden = take_mat(*pass.keep, pass.num_rows(), config_.hidden_size);
  const F32Mat h =
      pass.training() ? take_mat(*pass.keep, pass.num_rows(), config_.hidden_size) : F32Mat{};
  output_attn_res_.forward(ctx, h, hidden, pass.sources(), norm_);
  pass.final_in = h;
  return hidden;
}

void KimiK3::forward(const ExecCtx& ctx, F32Mat logits, const ModelBatch& batch,
                     const CacheBuffers& cache, RoutedExperts* routed) const {
  Arena& work = *ctx.workspace;
  const ArenaScope scope(work);
  Pass pass{batch.token_ids, batch.seqs, &batch, &cache, routed, &work, {}, {}, {}, {}};
  const ConstF32Mat hidden = run_layers(ctx, pass);

  const F32Mat picked = take_mat(work, batch.logit_rows.size(0), config_.hidden_size);
  ops::embed(ctx, picked, WeightRef::of(hidden), batch.logit_rows);
  head(ctx, logits, picked);
}

void KimiK3::head(const ExecCtx& ctx, F32Mat logits, ConstF32Mat hidden) const {
  lm_head_.forward(ctx, logits, hidden);
}

}  // namespace tandem::kimi_k3
