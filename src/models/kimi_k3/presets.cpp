#include "models/kimi_k3/init.h"

namespace tandem::kimi_k3 {
namespace {

/// Layers are KDA but for the 1-based ones in `full_attn`.
void set_layers(Config& config, std::int64_t num_layers, std::vector<std::int64_t> full_attn) {
  config.num_hidden_layers = num_layers;
  LinearAttnConfig& attn = config.linear_attn_config;
  attn.full_attn_layers = std::move(full_attn);
  for (std::int64_t layer = 1; layer <= num_layers; ++layer) {
    bool full = false;
    for (const std::int64_t listed : attn.full_attn_layers) {
      full = full || listed == layer;
    }
    if (!full) {
      attn.kda_layers.push_back(layer);
    }
  }
}

Config base_config() {
  Config config;
  config.first_k_dense_replace = 1;
  config.linear_attn_config.short_conv_kernel_size = 4;
  config.max_position_embeddings = 1048576;
  return config;
}

Preset nano() {
  Config config = base_config();
  config.vocab_size = 128;  // the demo's tokenizer has fewer; `tandem init --vocab-size` changes it
  config.hidden_size = 128;
  config.intermediate_size = 256;
  set_layers(config, 3, {3});
  config.num_attention_heads = config.num_key_value_heads = 4;
  config.attn_res_block_size = 2;
  config.num_experts = 8;
  config.num_experts_per_token = 2;
  config.num_shared_experts = 1;
  config.moe_intermediate_size = 128;
  config.routed_expert_hidden_size = 64;
  config.q_lora_rank = 64;
  config.kv_lora_rank = 64;
  config.qk_nope_head_dim = 32;
  config.qk_rope_head_dim = 16;
  config.v_head_dim = 32;
  config.linear_attn_config.head_dim = 32;
  config.linear_attn_config.num_heads = 4;
  config.dtype = "float32";
  return {"k3-nano", "about 1 M parameters: the demo's model", config, 4, false, {}};
}

Preset tiny() {
  Config config = base_config();
  config.vocab_size = 512;
  config.hidden_size = 128;
  config.intermediate_size = 320;
  set_layers(config, 9, {4, 8, 9});
  config.num_attention_heads = config.num_key_value_heads = 8;
  config.attn_res_block_size = 4;
  config.num_experts = 16;
  config.num_experts_per_token = 4;
  config.num_shared_experts = 2;
  config.moe_intermediate_size = 96;
  config.routed_expert_hidden_size = 64;
  config.q_lora_rank = 96;
  config.kv_lora_rank = 64;
  config.qk_nope_head_dim = 32;
  config.qk_rope_head_dim = 16;
  config.v_head_dim = 32;
  config.linear_attn_config.head_dim = 32;
  config.linear_attn_config.num_heads = 8;
  config.dtype = "float32";
  return {"k3-tiny", "4.9 M parameters, all features at odd sizes: parity tests", config, 32, true,
          {}};
}

Preset mini() {
  Config config = base_config();
  config.vocab_size = 32768;
  config.hidden_size = 1024;
  config.intermediate_size = 4096;
  set_layers(config, 8, {4, 8});
  config.num_attention_heads = config.num_key_value_heads = 8;
  config.attn_res_block_size = 4;
  config.num_experts = 64;
  config.num_experts_per_token = 8;
  config.num_shared_experts = 2;
  config.moe_intermediate_size = 512;
  config.routed_expert_hidden_size = 512;
  config.q_lora_rank = 512;
  config.kv_lora_rank = 512;
  config.qk_nope_head_dim = 128;
  config.qk_rope_head_dim = 64;
  config.v_head_dim = 128;
  config.linear_attn_config.head_dim = 128;
  config.linear_attn_config.num_heads = 8;
  InitOptions defaults;
  defaults.bf16 = true;
  defaults.experts = ExpertFormat::kMxFp4;
  return {"k3-mini", "about 0.5 G parameters: speed", config, 8, false, defaults};
}

Preset mid() {
  Preset preset = mini();
  Config& config = preset.config;
  config.hidden_size = 2048;
  config.intermediate_size = 8192;
  config.linear_attn_config.kda_layers.clear();
  set_layers(config, 12, {4, 8, 12});
  config.num_attention_heads = config.num_key_value_heads = 16;
  config.num_experts = 128;
  config.moe_intermediate_size = 1024;
  config.routed_expert_hidden_size = 1024;
  config.linear_attn_config.num_heads = 16;
  return {"k3-mid", "about 5 G parameters: speed on a GPU", config, 16, false, preset.defaults};
}

/// The released model (decode-kernels.md 0.1): 93 layers, 896 experts of width 3072.
Preset full() {
  Preset preset = mini();
  Config& config = preset.config;
  config.vocab_size = 163840;
  config.hidden_size = 7168;
  config.intermediate_size = 33792;
  config.linear_attn_config.kda_layers.clear();
  std::vector<std::int64_t> full_attn;
  for (std::int64_t layer = 4; layer <= 92; layer += 4) {
    full_attn.push_back(layer);
  }
  full_attn.push_back(93);
  set_layers(config, 93, full_attn);
  config.num_attention_heads = config.num_key_value_heads = 96;
  config.attn_res_block_size = 12;
  config.num_experts = 896;
  config.num_experts_per_token = 16;
  config.moe_intermediate_size = 3072;
  config.routed_expert_hidden_size = 3584;
  config.q_lora_rank = 1536;
  config.linear_attn_config.num_heads = 96;
  preset.defaults.experts = ExpertFormat::kNvFp4;
  return {"k3",   "the released shape, 1 T parameters and more: for --load-format dummy",
          config, 96,
          false,  preset.defaults};
}

}  // namespace

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all{nano(), tiny(), mini(), mid(), full()};
  return all;
}

std::optional<Preset> find_preset(std::string_view name) {
  for (const Preset& preset : presets()) {
    if (preset.name == name) {
      return preset;
    }
  }
  return std::nullopt;
}

}  // namespace tandem::kimi_k3
