#include "models/kimi_k3/tensor_table.h"

#include <fmt/format.h>

namespace tandem::kimi_k3 {
namespace {

using enum TensorRole;

class TableBuilder {
 public:
  TableBuilder(const Config& config, std::int64_t a_log_length)
      : config_(config), a_log_length_(a_log_length) {}

  std::vector<TensorEntry> build() {
    const std::int64_t d = config_.hidden_size;
    add("language_model.model.embed_tokens.weight", {config_.vocab_size, d}, kEmbedding);
    for (std::int64_t l = 0; l < config_.num_hidden_layers; ++l) {
      layer(l);
    }
    add("language_model.model.output_attn_res_norm.weight", {d}, kNorm);
    add("language_model.model.output_attn_res_proj.weight", {1, d}, kResProj);
    add("language_model.model.norm.weight", {d}, kNorm);
    add("language_model.lm_head.weight", {config_.vocab_size, d}, kHead);
    return std::move(table_);
  }

 private:
  void add(std::string name, std::vector<std::int64_t> shape, TensorRole role) {
    table_.push_back({std::move(name), std::move(shape), role});
  }

  void layer(std::int64_t l) {
    const std::int64_t d = config_.hidden_size;
    const std::string prefix = fmt::format("language_model.model.layers.{}.", l);
    for (const char* name : {"input_layernorm", "post_attention_layernorm",
                             "self_attention_res_norm", "mlp_res_norm"}) {
      add(prefix + name + ".weight", {d}, kNorm);
    }
    add(prefix + "self_attention_res_proj.weight", {1, d}, kResProj);
    add(prefix + "mlp_res_proj.weight", {1, d}, kResProj);
    config_.is_kda(l) ? kda(prefix + "self_attn.") : mla(prefix + "self_attn.");
    config_.is_moe(l) ? moe(prefix + "block_sparse_moe.")
                      : mlp(prefix + "mlp.", config_.intermediate_size);
  }

  void kda(const std::string& prefix) {
    const std::int64_t d = config_.hidden_size;
    const std::int64_t p = config_.kda_width();
    const LinearAttnConfig& attn = config_.linear_attn_config;
    for (const char* name : {"q_proj", "k_proj", "v_proj", "g_proj"}) {
      add(prefix + name + ".weight", {p, d}, kAttention);
    }
    for (const char* name : {"q_conv1d", "k_conv1d", "v_conv1d"}) {
      add(prefix + name + ".weight", {p, 1, attn.short_conv_kernel_size}, kConv);
    }
    add(prefix + "f_a_proj.weight", {attn.head_dim, d}, kAttention);
    add(prefix + "f_b_proj.weight", {p, attn.head_dim}, kAttention);
    add(prefix + "b_proj.weight", {attn.num_heads, d}, kAttention);
    add(prefix + "A_log", {a_log_length_}, kALog);
    add(prefix + "dt_bias", {p}, kDtBias);
    add(prefix + "o_norm.weight", {attn.head_dim}, kNorm);
    add(prefix + "o_proj.weight", {d, p}, kAttentionOut);
  }

  void mla(const std::string& prefix) {
    const std::int64_t d = config_.hidden_size;
    const std::int64_t heads = config_.num_attention_heads;
    const std::int64_t v = heads * config_.v_head_dim;
    add(prefix + "q_a_proj.weight", {config_.q_lora_rank, d}, kAttention);
    add(prefix + "q_a_layernorm.weight", {config_.q_lora_rank}, kNorm);
    add(prefix + "q_b_proj.weight",
        {heads * (config_.qk_nope_head_dim + config_.qk_rope_head_dim), config_.q_lora_rank},
        kAttention);
    add(prefix + "kv_a_proj_with_mqa.weight", {config_.kv_lora_rank + config_.qk_rope_head_dim, d},
        kAttention);
    add(prefix + "kv_a_layernorm.weight", {config_.kv_lora_rank}, kNorm);
    add(prefix + "kv_b_proj.weight",
        {heads * (config_.qk_nope_head_dim + config_.v_head_dim), config_.kv_lora_rank},
        kAttention);
    add(prefix + "g_proj.weight", {v, d}, kAttention);
    add(prefix + "o_proj.weight", {d, v}, kAttentionOut);
  }

  void mlp(const std::string& prefix, std::int64_t width) {
    const std::int64_t d = config_.hidden_size;
    add(prefix + "gate_proj.weight", {width, d}, kMlpIn);
    add(prefix + "up_proj.weight", {width, d}, kMlpIn);
    add(prefix + "down_proj.weight", {d, width}, kMlpOut);
  }

  void moe(const std::string& prefix) {
    const std::int64_t d = config_.hidden_size;
    const std::int64_t z = config_.routed_expert_hidden_size;
    const std::int64_t f = config_.moe_intermediate_size;
    add(prefix + "gate.weight", {config_.num_experts, d}, kRouter);
    add(prefix + "gate.e_score_correction_bias", {config_.num_experts}, kRouterBias);
    add(prefix + "routed_expert_down_proj.weight", {z, d}, kLatentDown);
    add(prefix + "routed_expert_norm.weight", {z}, kNorm);
    add(prefix + "routed_expert_up_proj.weight", {d, z}, kLatentUp);
    mlp(prefix + "shared_experts.", config_.shared_width());
    for (std::int64_t e = 0; e < config_.num_experts; ++e) {
      const std::string base = fmt::format("{}experts.{}.", prefix, e);
      add(base + "w1.weight", {f, z}, kExpertIn);
      add(base + "w3.weight", {f, z}, kExpertIn);
      add(base + "w2.weight", {z, f}, kExpertOut);
    }
  }

  const Config& config_;
  std::int64_t a_log_length_;
  std::vector<TensorEntry> table_;
};

}  // namespace

std::int64_t TensorEntry::numel() const {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) {
    n *= extent;
  }
  return n;
}

bool TensorEntry::always_f32() const {
  return role == kConv || role == kALog || role == kDtBias || role == kRouterBias ||
         (role == kNorm && name.ends_with(".o_norm.weight"));
}

std::vector<TensorEntry> tensor_table(const Config& config, std::int64_t a_log_length) {
  return TableBuilder(config, a_log_length).build();
}

}  // namespace tandem::kimi_k3
