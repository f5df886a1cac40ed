// config.h — Kimi K3's text_config (kimi-k3.md 1.1). Names are the checkpoint's own keys.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"

namespace tandem::kimi_k3 {

struct LinearAttnConfig {
  std::int64_t head_dim = 0;
  std::int64_t num_heads = 0;
  std::int64_t short_conv_kernel_size = 0;
  bool use_full_rank_gate = true;
  double gate_lower_bound = -5.0;
  std::vector<std::int64_t> full_attn_layers;  // 1-based
  std::vector<std::int64_t> kda_layers;        // 1-based

  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("head_dim", head_dim);
    visit("num_heads", num_heads);
    visit("short_conv_kernel_size", short_conv_kernel_size);
    visit("use_full_rank_gate", use_full_rank_gate);
    visit("gate_lower_bound", gate_lower_bound);
    visit("full_attn_layers", full_attn_layers);
    visit("kda_layers", kda_layers);
  }
};

struct Config {
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::string hidden_act = "situ";
  double activation_situ_beta = 4.0;
  double activation_situ_linear_beta = 25.0;
  double rms_norm_eps = 1e-5;
  std::int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  std::int64_t attn_res_block_size = 0;
  std::int64_t first_k_dense_replace = 0;
  std::int64_t moe_layer_freq = 1;
  std::int64_t num_experts = 0;
  std::int64_t num_experts_per_token = 0;
  std::int64_t num_shared_experts = 0;
  std::int64_t moe_intermediate_size = 0;
  std::int64_t routed_expert_hidden_size = 0;
  bool latent_moe_use_norm = true;
  bool moe_renormalize = true;
  std::string moe_router_activation_func = "sigmoid";
  std::string topk_method = "noaux_tc";
  bool use_grouped_topk = true;
  std::int64_t num_expert_group = 1;
  std::int64_t topk_group = 1;
  double routed_scaling_factor = 1.0;
  std::int64_t q_lora_rank = 0;
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;
  bool mla_use_nope = true;
  bool mla_use_output_gate = true;
  std::int64_t num_nextn_predict_layers = 0;
  std::string dtype = "bfloat16";
  LinearAttnConfig linear_attn_config;

  // Top level of config.json.
  std::int64_t bos_token_id = -1;
  std::int64_t eos_token_id = -1;
  std::int64_t pad_token_id = -1;

  /// Calls visit(key, field) for every plain field of text_config.
  template <typename Visitor>
  void visit_fields(Visitor&& visit) {
    visit("vocab_size", vocab_size);
    visit("hidden_size", hidden_size);
    visit("intermediate_size", intermediate_size);
    visit("num_hidden_layers", num_hidden_layers);
    visit("num_attention_heads", num_attention_heads);
    visit("num_key_value_heads", num_key_value_heads);
    visit("hidden_act", hidden_act);
    visit("activation_situ_beta", activation_situ_beta);
    visit("activation_situ_linear_beta", activation_situ_linear_beta);
    visit("rms_norm_eps", rms_norm_eps);
    visit("max_position_embeddings", max_position_embeddings);
    visit("tie_word_embeddings", tie_word_embeddings);
    visit("attn_res_block_size", attn_res_block_size);
    visit("first_k_dense_replace", first_k_dense_replace);
    visit("moe_layer_freq", moe_layer_freq);
    visit("num_experts", num_experts);
    visit("num_experts_per_token", num_experts_per_token);
    visit("num_shared_experts", num_shared_experts);
    visit("moe_intermediate_size", moe_intermediate_size);
    visit("routed_expert_hidden_size", routed_expert_hidden_size);
    visit("latent_moe_use_norm", latent_moe_use_norm);
    visit("moe_renormalize", moe_renormalize);
    visit("moe_router_activation_func", moe_router_activation_func);
    visit("topk_method", topk_method);
    visit("use_grouped_topk", use_grouped_topk);
    visit("num_expert_group", num_expert_group);
    visit("topk_group", topk_group);
    visit("routed_scaling_factor", routed_scaling_factor);
    visit("q_lora_rank", q_lora_rank);
    visit("kv_lora_rank", kv_lora_rank);
    visit("qk_nope_head_dim", qk_nope_head_dim);
    visit("qk_rope_head_dim", qk_rope_head_dim);
    visit("v_head_dim", v_head_dim);
    visit("mla_use_nope", mla_use_nope);
    visit("mla_use_output_gate", mla_use_output_gate);
    visit("num_nextn_predict_layers", num_nextn_predict_layers);
    visit("dtype", dtype);
  }

  /// `layer` is 0-based, as everywhere in code; the lists are 1-based.
  [[nodiscard]] bool is_kda(std::int64_t layer) const;
  [[nodiscard]] bool is_moe(std::int64_t layer) const { return layer >= first_k_dense_replace; }
  [[nodiscard]] std::int64_t num_moe_layers() const {
    return num_hidden_layers - first_k_dense_replace;
  }
  [[nodiscard]] std::int64_t kda_width() const {
    return linear_attn_config.num_heads * linear_attn_config.head_dim;
  }
  [[nodiscard]] std::int64_t shared_width() const {
    return num_shared_experts * moe_intermediate_size;
  }

  /// Drops all layers but the first `count`.
  void keep_layers(std::int64_t count);

  /// Every problem at once; empty when the config can run.
  [[nodiscard]] std::vector<std::string> validate() const;
  [[nodiscard]] std::string to_json() const;
};

/// Reads `dir`/config.json: every field of the table must be there with the right type, and nothing
/// else may be.
Expected<Config> load_config(const std::string& dir);
Expected<Config> parse_config(const std::string& json_text, const std::string& path);

}  // namespace tandem::kimi_k3
