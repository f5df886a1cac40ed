#include "models/kimi_k3/config.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

namespace tandem::kimi_k3 {
namespace {

using Json = nlohmann::ordered_json;

// Keys other tools write that do not change the text model's arithmetic (kimi-k3.md 1.1, 7.4).
constexpr std::array kIgnorableText{
    "model_type",    "quantization_config",  "rope_theta",   "rope_scaling",
    "head_dim",      "initializer_range",    "use_cache",    "logit_scale",
    "architectures", "torch_dtype",          "bos_token_id", "eos_token_id",
    "pad_token_id",  "transformers_version", "auto_map"};
constexpr std::array kIgnorableTop{
    "architectures",        "model_type",    "media_placeholder_token_id",
    "tie_word_embeddings",  "vision_config", "quantization_config",
    "transformers_version", "auto_map",      "dtype",
    "torch_dtype",          "ignore_index",  "image_token_index"};

bool read(const Json& json, std::int64_t& field) {
  if (!json.is_number_integer()) {
    return false;
  }
  field = json.get<std::int64_t>();
  return true;
}
bool read(const Json& json, double& field) {
  if (!json.is_number()) {
    return false;
  }
  field = json.get<double>();
  return true;
}
bool read(const Json& json, bool& field) {
  if (!json.is_boolean()) {
    return false;
  }
  field = json.get<bool>();
  return true;
}
bool read(const Json& json, std::string& field) {
  if (!json.is_string()) {
    return false;
  }
  field = json.get<std::string>();
  return true;
}
bool read(const Json& json, std::vector<std::int64_t>& field) {
  if (!json.is_array()) {
    return false;
  }
  field.clear();
  for (const Json& item : json) {
    if (!item.is_number_integer()) {
      return false;
    }
    field.push_back(item.get<std::int64_t>());
  }
  return true;
}

const char* kind_of(const std::int64_t&) {
  return "an integer";
}
const char* kind_of(const double&) {
  return "a number";
}
const char* kind_of(const bool&) {
  return "true or false";
}
const char* kind_of(const std::string&) {
  return "a string";
}
const char* kind_of(const std::vector<std::int64_t>&) {
  return "a list of integers";
}

/// Reads one JSON object into a struct with visit_fields; collects the first problem.
class ObjectReader {
 public:
  ObjectReader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  template <typename Field>
  void operator()(const char* key, Field& field) {
    known_.insert(key);
    if (!problem_.empty()) {
      return;
    }
    const auto found = object_.find(key);
    if (found == object_.end()) {
      problem_ = fmt::format("{}: missing field \"{}\", expected {}", where_, key, kind_of(field));
    } else if (!read(*found, field)) {
      problem_ = fmt::format("{}: field \"{}\" is {}, expected {}", where_, key, found->dump(),
                             kind_of(field));
    }
  }
  void allow(const char* key) { known_.insert(key); }

  /// The first problem, or the first key nobody asked for.
  [[nodiscard]] std::string problem() const {
    if (!problem_.empty()) {
      return problem_;
    }
    for (const auto& [key, value] : object_.items()) {
      if (!known_.contains(key)) {
        return fmt::format("{}: unknown field \"{}\"", where_, key);
      }
    }
    return {};
  }

 private:
  const Json& object_;
  std::string where_;
  std::set<std::string, std::less<>> known_;
  std::string problem_;
};

}  // namespace

void Config::keep_layers(std::int64_t count) {
  num_hidden_layers = count;
  for (std::vector<std::int64_t>* layers :
       {&linear_attn_config.full_attn_layers, &linear_attn_config.kda_layers}) {
    std::erase_if(*layers, [count](std::int64_t layer) { return layer > count; });
  }
}

bool Config::is_kda(std::int64_t layer) const {
  return std::ranges::find(linear_attn_config.kda_layers, layer + 1) !=
         linear_attn_config.kda_layers.end();
}

std::vector<std::string> Config::validate() const {
  std::vector<std::string> problems;
  const auto require = [&](bool ok, std::string text) {
    if (!ok) {
      problems.push_back(std::move(text));
    }
  };
  const auto positive = [&](std::int64_t value, const char* key) {
    require(value > 0 && value <= (std::int64_t{1} << 31),
            fmt::format("{} = {}, expected a positive 31-bit integer", key, value));
  };
  const LinearAttnConfig& linear = linear_attn_config;
  for (const auto& [value, key] : std::initializer_list<std::pair<std::int64_t, const char*>>{
           {vocab_size, "vocab_size"},
           {hidden_size, "hidden_size"},
           {intermediate_size, "intermediate_size"},
           {num_hidden_layers, "num_hidden_layers"},
           {num_attention_heads, "num_attention_heads"},
           {num_experts, "num_experts"},
           {num_experts_per_token, "num_experts_per_token"},
           {num_shared_experts, "num_shared_experts"},
           {moe_intermediate_size, "moe_intermediate_size"},
           {routed_expert_hidden_size, "routed_expert_hidden_size"},
           {q_lora_rank, "q_lora_rank"},
           {kv_lora_rank, "kv_lora_rank"},
           {qk_nope_head_dim, "qk_nope_head_dim"},
           {qk_rope_head_dim, "qk_rope_head_dim"},
           {v_head_dim, "v_head_dim"},
           {attn_res_block_size, "attn_res_block_size"},
           {linear.head_dim, "linear_attn_config.head_dim"},
           {linear.num_heads, "linear_attn_config.num_heads"},
           {linear.short_conv_kernel_size, "linear_attn_config.short_conv_kernel_size"}}) {
    positive(value, key);
  }
  require(hidden_act == "situ",
          fmt::format("hidden_act = \"{}\", supported: \"situ\"", hidden_act));
  require(moe_router_activation_func == "sigmoid",
          fmt::format("moe_router_activation_func = \"{}\", supported: \"sigmoid\"",
                      moe_router_activation_func));
  require(topk_method == "noaux_tc",
          fmt::format("topk_method = \"{}\", supported: \"noaux_tc\"", topk_method));
  require(num_key_value_heads == num_attention_heads,
          "num_key_value_heads differs from num_attention_heads; MLA has no grouping");
  require(!tie_word_embeddings, "tie_word_embeddings = true is not supported");
  require(moe_layer_freq == 1, "moe_layer_freq other than 1 is not supported");
  require(num_expert_group == 1 && topk_group == 1,
          "expert groups (num_expert_group, topk_group other than 1) are not supported");
  require(latent_moe_use_norm, "latent_moe_use_norm = false is not supported");
  require(mla_use_nope, "mla_use_nope = false (rotary MLA) is not supported");
  require(mla_use_output_gate, "mla_use_output_gate = false is not supported");
  require(linear.use_full_rank_gate,
          "linear_attn_config.use_full_rank_gate = false is not supported");
  require(linear.gate_lower_bound < 0,
          fmt::format("linear_attn_config.gate_lower_bound = {}, expected a negative number",
                      linear.gate_lower_bound));
  require(num_nextn_predict_layers == 0, "num_nextn_predict_layers other than 0 is not supported");
  require(num_experts_per_token <= num_experts,
          fmt::format("num_experts_per_token = {} exceeds num_experts = {}", num_experts_per_token,
                      num_experts));
  require(first_k_dense_replace >= 0 && first_k_dense_replace <= num_hidden_layers,
          "first_k_dense_replace is outside 0..num_hidden_layers");
  require(attn_res_block_size <= 0 || num_hidden_layers / attn_res_block_size < 31,
          "more than 31 attention-residual blocks");

  std::vector<std::int64_t> listed = linear.kda_layers;
  listed.insert(listed.end(), linear.full_attn_layers.begin(), linear.full_attn_layers.end());
  std::ranges::sort(listed);
  bool partition = static_cast<std::int64_t>(listed.size()) == num_hidden_layers;
  for (std::size_t i = 0; partition && i < listed.size(); ++i) {
    partition = listed[i] == static_cast<std::int64_t>(i) + 1;
  }
  require(partition, fmt::format("linear_attn_config: kda_layers and full_attn_layers must name "
                                 "each layer 1..{} exactly once",
                                 num_hidden_layers));
  return problems;
}

std::string Config::to_json() const {
  Config copy = *this;
  Json text;
  text["model_type"] = "kimi_linear";
  copy.visit_fields([&](const char* key, const auto& field) { text[key] = field; });
  Json linear;
  copy.linear_attn_config.visit_fields(
      [&](const char* key, const auto& field) { linear[key] = field; });
  text["linear_attn_config"] = linear;
  Json top;
  top["architectures"] = {"KimiK3ForConditionalGeneration"};
  top["model_type"] = "kimi_k3";
  top["bos_token_id"] = bos_token_id;
  top["eos_token_id"] = eos_token_id;
  top["pad_token_id"] = pad_token_id;
  top["tie_word_embeddings"] = tie_word_embeddings;
  top["text_config"] = text;
  return top.dump(2) + "\n";
}

Expected<Config> parse_config(const std::string& json_text, const std::string& path) {
  const Json top = Json::parse(json_text, nullptr, false);
  if (top.is_discarded() || !top.is_object()) {
    return fail("{}: expected a JSON object", path);
  }
  const auto type = top.find("model_type");
  if (type == top.end() || *type != "kimi_k3") {
    return fail("{}: field \"model_type\" is {}, expected \"kimi_k3\"", path,
                type == top.end() ? "missing" : type->dump());
  }
  const auto text = top.find("text_config");
  if (text == top.end() || !text->is_object()) {
    return fail("{}: missing object \"text_config\"", path);
  }
  const auto linear = text->find("linear_attn_config");
  if (linear == text->end() || !linear->is_object()) {
    return fail("{}: text_config: missing object \"linear_attn_config\"", path);
  }

  Config config;
  ObjectReader top_reader(top, path);
  top_reader("bos_token_id", config.bos_token_id);
  top_reader("eos_token_id", config.eos_token_id);
  top_reader("pad_token_id", config.pad_token_id);
  top_reader.allow("text_config");
  std::ranges::for_each(kIgnorableTop, [&](const char* key) { top_reader.allow(key); });
  ObjectReader text_reader(*text, path + ": text_config");
  config.visit_fields(text_reader);
  text_reader.allow("linear_attn_config");
  std::ranges::for_each(kIgnorableText, [&](const char* key) { text_reader.allow(key); });
  ObjectReader linear_reader(*linear, path + ": text_config.linear_attn_config");
  config.linear_attn_config.visit_fields(linear_reader);
  for (const ObjectReader* reader : {&top_reader, &text_reader, &linear_reader}) {
    if (const std::string problem = reader->problem(); !problem.empty()) {
      return Failure{problem};
    }
  }
  if (const auto problems = config.validate(); !problems.empty()) {
    return fail("{}: {}", path, fmt::join(problems, "; "));
  }
  return config;
}

Expected<Config> load_config(const std::string& dir) {
  const std::string path = dir + "/config.json";
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return fail("{}: cannot open; expected a checkpoint folder with config.json", path);
  }
  std::stringstream text;
  text << file.rdbuf();
  return parse_config(text.str(), path);
}

}  // namespace tandem::kimi_k3
