// footprint.cpp — parameters and bytes, counted on what is loaded.
#include "models/kimi_k3/model.h"
#include "models/kimi_k3/tensor_table.h"

namespace tandem::kimi_k3 {

ModelFootprint KimiK3::footprint() const {
  ModelFootprint footprint;
  for (const TensorEntry& entry : tensor_table(config_, config_.linear_attn_config.num_heads)) {
    footprint.num_parameters += entry.numel();
    const bool expert = entry.role == TensorRole::kExpertIn || entry.role == TensorRole::kExpertOut;
    if (entry.role != TensorRole::kEmbedding && !expert) {
      footprint.num_active_parameters += entry.numel();
    }
  }
  const std::int64_t expert_parameters =
      3 * config_.moe_intermediate_size * config_.routed_expert_hidden_size;
  footprint.num_active_parameters +=
      config_.num_moe_layers() * config_.num_experts_per_token * expert_parameters;

  std::int64_t expert_bytes = 0;
  const auto add = [&](std::initializer_list<const nn::Linear*> linears) {
    for (const nn::Linear* linear : linears) {
      footprint.decode_read_bytes += linear->packed_bytes();
    }
  };
  for (const Layer& layer : layers_) {
    if (layer.kda) {
      const nn::Kda& kda = *layer.kda;
      add({&kda.q_proj, &kda.k_proj, &kda.v_proj, &kda.g_proj, &kda.f_a_proj, &kda.f_b_proj,
           &kda.b_proj, &kda.o_proj});
    } else {
      const nn::Mla& mla = *layer.mla;
      add({&mla.q_a_proj, &mla.q_b_proj, &mla.kv_a_proj, &mla.g_proj, &mla.o_proj});
      footprint.decode_read_bytes += mla.kv_b_bytes();
    }
    if (layer.mlp) {
      add({&layer.mlp->gate_proj, &layer.mlp->up_proj, &layer.mlp->down_proj});
      continue;
    }
    const nn::LatentMoe& moe = *layer.moe;
    add({&moe.gate, &moe.down_proj, &moe.up_proj, &moe.shared.gate_proj, &moe.shared.up_proj,
         &moe.shared.down_proj});
    expert_bytes += moe.w1.packed_bytes() + moe.w3.packed_bytes() + moe.w2.packed_bytes();
  }
  add({&lm_head_});
  const std::int64_t embed_bytes =
      embed_.rows * embed_.cols * (embed_.format == WeightFormat::kBF16 ? 2 : 4);
  footprint.weight_bytes = footprint.decode_read_bytes + expert_bytes + embed_bytes;
  footprint.expert_bytes = expert_bytes;
  footprint.num_experts = config_.num_experts;
  footprint.decode_read_bytes += expert_bytes * config_.num_experts_per_token / config_.num_experts;
  return footprint;
}

}  // namespace tandem::kimi_k3
