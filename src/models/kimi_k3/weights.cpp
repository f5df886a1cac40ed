// weights.cpp — from a checkpoint's tensors (kimi-k3.md 7) to the model's layers.
#include <cmath>
#include <cstring>

#include "core/checked_cast.h"
#include "models/kimi_k3/dummy.h"
#include "models/kimi_k3/init.h"
#include "models/kimi_k3/model.h"
#include "models/kimi_k3/stored_values.h"
#include "tensor/quant.h"

namespace tandem::kimi_k3 {
namespace {

using Shape = std::vector<std::int64_t>;

/// A matrix as the checkpoint holds it, with the bytes made aligned where the file does not align
/// them.
struct StoredMatrix {
  WeightRef ref;
  std::vector<std::byte> data_copy;
  std::vector<std::byte> scales_copy;
};

const void* aligned(const TensorInfo& tensor, std::vector<std::byte>& copy) {
  const auto align = static_cast<std::uintptr_t>(dtype_size(tensor.dtype));
  if (reinterpret_cast<std::uintptr_t>(tensor.bytes.data()) % align == 0) {
    return tensor.bytes.data();
  }
  copy.assign(tensor.bytes.begin(), tensor.bytes.end());
  return copy.data();
}

}  // namespace

/// Walks the model and takes each tensor once; the first problem sticks and ends the walk.
class WeightLoader {
 public:
  WeightLoader(const ExecCtx& ctx, Checkpoint& checkpoint, KimiK3& model, LoadOptions options)
      : ctx_(ctx),
        checkpoint_(checkpoint),
        model_(model),
        config_(model.config_),
        options_(options) {}

  Status load() {
    load_top();
    for (std::int64_t l = 0; l < config_.num_hidden_layers && ok(); ++l) {
      load_layer(l, model_.layers_.emplace_back());
    }
    if (!ok()) {
      return Failure{problem_};
    }
    checkpoint_.skip_prefix("vision_tower.");
    checkpoint_.skip_prefix("mm_projector.");
    if (const auto left = checkpoint_.unused(); !left.empty()) {
      return fail("checkpoint {}: {} tensors the model does not have, the first is {}",
                  checkpoint_.dir(), left.size(), left.front());
    }
    return Ok{};
  }

 private:
  [[nodiscard]] bool ok() const { return problem_.empty(); }

  template <typename T>
  bool keep_problem(const Expected<T>& result) {
    if (!result.ok() && ok()) {
      problem_ = result.message();
    }
    return result.ok() && ok();
  }

  bool is_sound(const std::string& name, const Status& status) {
    if (!status.ok()) {
      problem_ =
          fmt::format("checkpoint {}: tensor {}: {}", checkpoint_.dir(), name, status.message());
    }
    return status.ok();
  }

  // --- single tensors
  /// A tensor in F32 or BF16, all of it numbers.
  std::optional<TensorInfo> plain(const std::string& name, const Shape& shape) {
    const auto tensor = checkpoint_.take(name, {DType::kF32, DType::kBF16}, shape);
    if (!keep_problem(tensor)) {
      return std::nullopt;
    }
    const bool sound = !options_.dummy_experts.empty() ||
                       is_sound(name, check_finite(tensor->bytes, tensor->dtype, shape.back()));
    return sound ? std::optional(*tensor) : std::nullopt;
  }

  /// A small tensor, always held in fp32.
  nn::Parameter* vector(const std::string& name, Shape shape) {
    const auto tensor = plain(name, shape);
    if (!tensor) {
      return nullptr;
    }
    nn::Parameter& parameter =
        model_.store_.add(*ctx_.device, name, std::move(shape), options_.trainable);
    std::vector<float> values(usize(parameter.numel()));
    to_float(*tensor, values);
    set_value(parameter, values);
    return &parameter;
  }

  /// Finds in which of the formats of kimi-k3.md 7 `base` (a name without ".weight") is stored.
  std::optional<StoredMatrix> matrix(const std::string& base, std::int64_t rows,
                                     std::int64_t cols) {
    StoredMatrix stored;
    WeightRef& ref = stored.ref;
    ref = {WeightFormat::kF32, rows, cols, cols, nullptr, nullptr, 1.0F};
    const auto take = [&](const std::string& name, DType dtype, Shape shape,
                          std::vector<std::byte>& copy) -> const void* {
      const auto tensor = checkpoint_.take(name, dtype, shape);
      return keep_problem(tensor) ? aligned(*tensor, copy) : nullptr;
    };
    const TensorInfo* weight = checkpoint_.find(base + ".weight");
    if (checkpoint_.find(base + ".weight_packed") != nullptr) {
      ref.format = WeightFormat::kMxFp4;
      ref.data = take(base + ".weight_packed", DType::kU8, {rows, cols / 2}, stored.data_copy);
      ref.scales =
          take(base + ".weight_scale", DType::kU8, {rows, cols / kMxFp4Group}, stored.scales_copy);
    } else if (weight != nullptr && weight->dtype == DType::kU8) {
      ref.format = WeightFormat::kNvFp4;
      ref.data = take(base + ".weight", DType::kU8, {rows, cols / 2}, stored.data_copy);
      ref.scales = take(base + ".weight_scale", DType::kF8E4M3, {rows, cols / kNvFp4Group},
                        stored.scales_copy);
      ref.scale_2 = scalar(base + ".weight_scale_2");
      scalar(base + ".input_scale");  // activations stay fp32: read for completeness only
    } else if (weight != nullptr && weight->dtype == DType::kF8E4M3) {
      ref.format = WeightFormat::kFp8Block;
      ref.data = take(base + ".weight", DType::kF8E4M3, {rows, cols}, stored.data_copy);
      const std::int64_t row_blocks = (rows + kFp8Block - 1) / kFp8Block;
      const std::int64_t col_blocks = (cols + kFp8Block - 1) / kFp8Block;
      ref.scales = take(base + ".weight_scale", DType::kF32, {row_blocks, 1, col_blocks, 1},
                        stored.scales_copy);
    } else {
      if (const auto tensor = plain(base + ".weight", {rows, cols})) {
        ref.format = tensor->dtype == DType::kBF16 ? WeightFormat::kBF16 : WeightFormat::kF32;
        ref.data = aligned(*tensor, stored.data_copy);
      }
    }
    if (!ok()) {
      return std::nullopt;
    }
    return is_sound(base, validate_scales(ref)) ? std::optional(std::move(stored)) : std::nullopt;
  }

  float scalar(const std::string& name) {
    const TensorInfo* found = checkpoint_.find(name);
    const Shape shape = found != nullptr ? found->shape : Shape{};
    const auto tensor = checkpoint_.take(name, DType::kF32, shape);
    if (!keep_problem(tensor)) {
      return 0;
    }
    const std::vector<float> values = tensor->copy<float>();
    if (values.size() != 1 || !std::isfinite(values[0])) {
      problem_ = fmt::format("checkpoint {}: tensor {}: expected one finite number",
                             checkpoint_.dir(), name);
      return 0;
    }
    return values[0];
  }

  /// The fp32 master of a matrix, when training.
  nn::Parameter* master(const std::string& base, const StoredMatrix& stored) {
    const auto values = dequantise_any(stored.ref);
    if (!keep_problem(values)) {
      return nullptr;
    }
    nn::Parameter& parameter =
        model_.store_.add(*ctx_.device, base + ".weight", {stored.ref.rows, stored.ref.cols}, true);
    set_value(parameter, *values);
    return &parameter;
  }
  void set_value(nn::Parameter& parameter, const std::vector<float>& values) {
    parameter.value_storage.assign(std::as_bytes(std::span(values)));
  }

  /// Loads one matrix and hands it on: as a Parameter& when training, else as the WeightRef of the
  /// stored bytes.
  template <typename Sink>
  void load_matrix(const std::string& base, std::int64_t rows, std::int64_t cols, Sink&& sink) {
    const auto stored = ok() ? matrix(base, rows, cols) : std::nullopt;
    if (!stored) {
      return;
    }
    if (!options_.trainable) {
      sink(stored->ref);
    } else if (nn::Parameter* parameter = master(base, *stored); parameter != nullptr) {
      sink(*parameter);
    }
  }

  void linear(nn::Linear& out, const std::string& base, std::int64_t rows, std::int64_t cols) {
    load_matrix(base, rows, cols, [&](auto&& weight) { out = nn::Linear(ctx_, weight); });
  }
  void mlp(nn::Mlp& out, const std::string& prefix, std::int64_t width) {
    linear(out.gate_proj, prefix + "gate_proj", width, config_.hidden_size);
    linear(out.up_proj, prefix + "up_proj", width, config_.hidden_size);
    linear(out.down_proj, prefix + "down_proj", config_.hidden_size, width);
    out.act = situ();
  }
  [[nodiscard]] SituParams situ() const {
    return {static_cast<float>(config_.activation_situ_beta),
            static_cast<float>(config_.activation_situ_linear_beta)};
  }
  [[nodiscard]] float eps() const { return static_cast<float>(config_.rms_norm_eps); }

  nn::AttnRes attn_res(const std::string& base) {
    return {vector(base + "_norm.weight", {config_.hidden_size}),
            vector(base + "_proj.weight", {1, config_.hidden_size}), eps()};
  }

  // --- parts of the model
  void load_top() {
    const std::string prefix = "language_model.model.";
    load_embedding(prefix + "embed_tokens.weight");
    linear(model_.lm_head_, "language_model.lm_head", config_.vocab_size, config_.hidden_size);
    model_.norm_ = {vector(prefix + "norm.weight", {config_.hidden_size}), eps()};
    model_.output_attn_res_ = attn_res(prefix + "output_attn_res");
  }
  /// Its rows are looked up, not multiplied: BF16 or F32 only.
  void load_embedding(const std::string& name) {
    const Shape shape{config_.vocab_size, config_.hidden_size};
    if (options_.trainable) {
      model_.embed_master_ = vector(name, shape);
      if (model_.embed_master_ != nullptr) {
        model_.embed_ = WeightRef::of(model_.embed_master_->value_mat());
      }
      return;
    }
    if (const auto tensor = plain(name, shape)) {
      Storage& storage = model_.embed_storage_;
      storage = Storage(isize(tensor->bytes), *ctx_.device);
      storage.assign(tensor->bytes);
      model_.embed_ = {tensor->dtype == DType::kBF16 ? WeightFormat::kBF16 : WeightFormat::kF32,
                       shape[0],
                       shape[1],
                       shape[1],
                       storage.data(),
                       nullptr,
                       1.0F};
    }
  }

  void load_layer(std::int64_t index, Layer& layer) {
    const std::string prefix = fmt::format("language_model.model.layers.{}.", index);
    layer.input_layernorm = {vector(prefix + "input_layernorm.weight", {config_.hidden_size}),
                             eps()};
    layer.post_attention_layernorm = {
        vector(prefix + "post_attention_layernorm.weight", {config_.hidden_size}), eps()};
    layer.self_attention_res = attn_res(prefix + "self_attention_res");
    layer.mlp_res = attn_res(prefix + "mlp_res");
    if (config_.is_kda(index)) {
      layer.kda = std::make_unique<nn::Kda>();
      load_kda(*layer.kda, prefix + "self_attn.");
      layer.cache_index = model_.cache_spec_.state_layers.size();
      const LinearAttnConfig& attn = config_.linear_attn_config;
      model_.cache_spec_.state_layers.push_back({attn.num_heads, attn.head_dim, attn.head_dim,
                                                 attn.short_conv_kernel_size - 1,
                                                 3 * config_.kda_width()});
    } else {
      layer.mla = std::make_unique<nn::Mla>();
      load_mla(*layer.mla, prefix + "self_attn.");
      layer.cache_index = model_.cache_spec_.latent_widths.size();
      model_.cache_spec_.latent_widths.push_back(layer.mla->cache_width());
      const bool is_fp32 = layer.mla->kv_a_proj.packed().format == WeightFormat::kF32;
      model_.cache_spec_.latent_format = is_fp32 ? LatentFormat::kF32 : LatentFormat::kBF16;
      model_.cache_spec_.trainable = options_.trainable;
    }
    if (config_.is_moe(index)) {
      layer.moe = std::make_unique<nn::LatentMoe>();
      layer.moe_index = index - config_.first_k_dense_replace;
      load_moe(*layer.moe, prefix + "block_sparse_moe.");
    } else {
      layer.mlp = std::make_unique<nn::Mlp>();
      mlp(*layer.mlp, prefix + "mlp.", config_.intermediate_size);
    }
  }

  void load_kda(nn::Kda& kda, const std::string& prefix) {
    const LinearAttnConfig& attn = config_.linear_attn_config;
    const std::int64_t width = config_.kda_width();
    const std::int64_t hidden = config_.hidden_size;
    kda.num_heads = attn.num_heads;
    kda.head_dim = attn.head_dim;
    kda.gate = {true, static_cast<float>(attn.gate_lower_bound)};
    kda.norm_eps = eps();
    linear(kda.q_proj, prefix + "q_proj", width, hidden);
    linear(kda.k_proj, prefix + "k_proj", width, hidden);
    linear(kda.v_proj, prefix + "v_proj", width, hidden);
    linear(kda.g_proj, prefix + "g_proj", width, hidden);
    linear(kda.f_a_proj, prefix + "f_a_proj", attn.head_dim, hidden);
    linear(kda.f_b_proj, prefix + "f_b_proj", width, attn.head_dim);
    linear(kda.b_proj, prefix + "b_proj", attn.num_heads, hidden);
    linear(kda.o_proj, prefix + "o_proj", hidden, width);
    for (const auto& [slot, name] :
         {std::pair{&kda.q_conv1d, "q"}, {&kda.k_conv1d, "k"}, {&kda.v_conv1d, "v"}}) {
      *slot = vector(prefix + name + "_conv1d.weight", {width, 1, attn.short_conv_kernel_size});
    }
    kda.A_log = a_log(prefix + "A_log");
    kda.dt_bias = vector(prefix + "dt_bias", {width});
    kda.o_norm = vector(prefix + "o_norm.weight", {attn.head_dim});
  }

  /// A_log may be stored longer than the head count (128 for 96 heads); the first num_heads values
  /// are used.
  nn::Parameter* a_log(const std::string& name) {
    const TensorInfo* found = checkpoint_.find(name);
    const std::int64_t heads = config_.linear_attn_config.num_heads;
    const bool longer = found != nullptr && found->shape.size() == 1 && found->shape[0] > heads;
    return vector(name, {longer ? found->shape[0] : heads});
  }

  void load_mla(nn::Mla& mla, const std::string& prefix) {
    constexpr float kLatentNormEps = 1e-6F;  // not rms_norm_eps: kimi-k3.md 1.3
    const std::int64_t hidden = config_.hidden_size;
    mla.num_heads = config_.num_attention_heads;
    mla.kv_lora_rank = config_.kv_lora_rank;
    mla.qk_nope_head_dim = config_.qk_nope_head_dim;
    mla.qk_rope_head_dim = config_.qk_rope_head_dim;
    mla.v_head_dim = config_.v_head_dim;
    const std::int64_t heads = mla.num_heads;
    linear(mla.q_a_proj, prefix + "q_a_proj", config_.q_lora_rank, hidden);
    linear(mla.q_b_proj, prefix + "q_b_proj", heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim),
           config_.q_lora_rank);
    linear(mla.kv_a_proj, prefix + "kv_a_proj_with_mqa", mla.cache_width(), hidden);
    linear(mla.g_proj, prefix + "g_proj", heads * mla.v_head_dim, hidden);
    linear(mla.o_proj, prefix + "o_proj", hidden, heads * mla.v_head_dim);
    mla.q_a_norm = {vector(prefix + "q_a_layernorm.weight", {config_.q_lora_rank}), kLatentNormEps};
    mla.kv_a_norm = {vector(prefix + "kv_a_layernorm.weight", {mla.kv_lora_rank}), kLatentNormEps};
    load_matrix(prefix + "kv_b_proj", heads * (mla.qk_nope_head_dim + mla.v_head_dim),
                mla.kv_lora_rank, [&](auto&& weight) { set_kv_b(mla, weight); });
  }
  void set_kv_b(nn::Mla& mla, nn::Parameter& parameter) { mla.set_kv_b(ctx_, parameter); }
  void set_kv_b(nn::Mla& mla, const WeightRef& weight) {
    if (weight.format == WeightFormat::kF32 || weight.format == WeightFormat::kBF16) {
      mla.set_kv_b(ctx_, weight);
      return;
    }
    // Cut per head and partly transposed, so a quantised kv_b is dequantised first
    // (kimi-k3.md 5.2).
    const auto values = dequantise_any(weight);
    if (keep_problem(values)) {
      mla.set_kv_b(ctx_, WeightRef::of({values->data(), {weight.rows, weight.cols}}));
    }
  }

  void load_moe(nn::LatentMoe& moe, const std::string& prefix) {
    const std::int64_t hidden = config_.hidden_size;
    const std::int64_t latent = config_.routed_expert_hidden_size;
    const std::int64_t width = config_.moe_intermediate_size;
    moe.num_experts_per_token = config_.num_experts_per_token;
    moe.router = {config_.moe_renormalize, static_cast<float>(config_.routed_scaling_factor)};
    moe.act = situ();
    linear(moe.gate, prefix + "gate", config_.num_experts, hidden);
    moe.bias = vector(prefix + "gate.e_score_correction_bias", {config_.num_experts});
    if (moe.bias != nullptr) {
      moe.bias->frozen = true;
    }
    linear(moe.down_proj, prefix + "routed_expert_down_proj", latent, hidden);
    linear(moe.up_proj, prefix + "routed_expert_up_proj", hidden, latent);
    moe.norm = {vector(prefix + "routed_expert_norm.weight", {latent}), eps()};
    mlp(moe.shared, prefix + "shared_experts.", config_.shared_width());
    for (std::int64_t e = 0; e < config_.num_experts && ok(); ++e) {
      const std::string base = fmt::format("{}experts.{}.", prefix, e);
      load_matrix(base + "w1", width, latent, [&](auto&& weight) { moe.w1.add(ctx_, weight); });
      load_matrix(base + "w3", width, latent, [&](auto&& weight) { moe.w3.add(ctx_, weight); });
      load_matrix(base + "w2", latent, width, [&](auto&& weight) { moe.w2.add(ctx_, weight); });
    }
  }

  const ExecCtx& ctx_;
  Checkpoint& checkpoint_;
  KimiK3& model_;
  const Config& config_;
  LoadOptions options_;
  std::string problem_;
};

namespace {

Expected<InitOptions> dummy_format(const std::string& experts) {
  InitOptions options;
  options.bf16 = true;
  if (experts == "mxfp4") {
    options.experts = ExpertFormat::kMxFp4;
  } else if (experts == "nvfp4") {
    options.experts = ExpertFormat::kNvFp4;
  } else if (experts != "bf16") {
    return fail("dummy weights: experts in '{}': expected bf16, mxfp4 or nvfp4", experts);
  }
  return options;
}

}  // namespace

Expected<std::unique_ptr<KimiK3>> KimiK3::load(const ExecCtx& ctx, const std::string& dir,
                                               LoadOptions options) {
  const bool is_dummy = !options.dummy_experts.empty();
  const auto preset = is_dummy ? find_preset(dir) : std::nullopt;
  auto config = preset ? Expected<Config>(preset->config) : load_config(dir);
  if (!config.ok()) {
    return config.failure();
  }
  const std::int64_t stored_layers = config->num_hidden_layers;
  if (options.num_layers > stored_layers) {
    return fail("{}: has {} layers, expected at least {}", dir, stored_layers, options.num_layers);
  }
  if (options.num_layers > 0) {
    config->keep_layers(options.num_layers);
  }
  std::optional<DummyTensors> dummy;
  if (is_dummy) {
    auto format = dummy_format(options.dummy_experts);
    if (!format.ok()) {
      return format.failure();
    }
    dummy.emplace(*config, *format);
  }
  auto checkpoint = is_dummy ? Expected<Checkpoint>(dummy->checkpoint(dir)) : Checkpoint::open(dir);
  if (!checkpoint.ok()) {
    return checkpoint.failure();
  }
  for (std::int64_t l = config->num_hidden_layers; l < stored_layers; ++l) {
    checkpoint->skip_prefix(fmt::format("language_model.model.layers.{}.", l));
  }
  std::unique_ptr<KimiK3> model(new KimiK3(*std::move(config)));
  if (const Status status = WeightLoader(ctx, *checkpoint, *model, options).load(); !status.ok()) {
    return status.failure();
  }
  return model;
}

}  // namespace tandem::kimi_k3
