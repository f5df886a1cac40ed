#include "models/kimi_k3/init.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "core/check.h"
#include "core/checked_cast.h"
#include "core/rng.h"
#include "io/atomic_file.h"
#include "io/safetensors.h"
#include "models/kimi_k3/stored_parts.h"
#include "models/kimi_k3/tensor_table.h"
#include "tensor/quant.h"

namespace tandem::kimi_k3 {
namespace {

using enum TensorRole;

std::uint64_t name_hash(std::string_view name) {
  std::uint64_t hash = 0xCBF29CE484222325ULL;  // FNV-1a
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  }
  return hash;
}

/// Values of one tensor. fan_in is the length of the rows a matrix is multiplied with.
class Initializer {
 public:
  Initializer(const Preset& preset, std::uint64_t seed) : preset_(preset), seed_(seed) {}

  [[nodiscard]] std::vector<float> values(const TensorEntry& entry) const {
    Rng rng(mix_key({seed_, name_hash(entry.name)}));
    std::vector<float> out(usize(entry.numel()));
    const auto fill = [&](auto&& draw) {
      for (float& value : out) {
        value = static_cast<float>(draw());
      }
    };
    const double fan_in = static_cast<double>(entry.shape.back());
    const auto normal = [&](double std) { fill([&] { return std * rng.normal(); }); };
    const auto uniform = [&](double low, double high) {
      fill([&] { return low + (high - low) * rng.uniform(); });
    };
    preset_.parity_init ? parity(entry, fan_in, normal, uniform, fill, rng)
                        : trainable(entry, fan_in, normal, uniform, fill);
    if (preset_.parity_init) {
      shrink_latents(entry, out);
    }
    if (entry.role == kALog) {  // the stored vector is longer than the head count
      std::fill(out.begin() + preset_.config.linear_attn_config.num_heads, out.end(), 0.0F);
    }
    return out;
  }

 private:
  /// A start from which SFT learns: unit-variance matrices, outputs scaled down by depth, uniform
  /// depth mixing, decays from about 0.01 to 1.3 nats a token.
  template <typename Normal, typename Uniform, typename Fill>
  void trainable(const TensorEntry& entry, double fan_in, Normal&& normal, Uniform&& uniform,
                 Fill&& fill) const {
    const double depth_scale =
        1.0 / std::sqrt(2.0 * static_cast<double>(preset_.config.num_hidden_layers));
    switch (entry.role) {
      case kEmbedding:
        return normal(0.5);
      case kHead:
        return normal(0.02);
      case kNorm:
        return fill([] { return 1.0; });
      case kResProj:
      case kRouterBias:
      case kALog:
        return fill([] { return 0.0; });
      case kConv:
        return uniform(-0.5, 0.5);
      case kDtBias:
        return uniform(-6.0, -1.0);
      case kAttentionOut:
      case kMlpOut:
      case kLatentUp:
        return normal(depth_scale / std::sqrt(fan_in));
      case kAttention:
      case kMlpIn:
      case kRouter:
      case kLatentDown:
      case kExpertIn:
      case kExpertOut:
        return normal(1.0 / std::sqrt(fan_in));
    }
  }

  /// kimi-k3.md 10: every feature matters (saturating SiTU, spread depth scores, a bias that
  /// changes the chosen experts). Two scales are smaller than there, *_res_proj by 4 and the output
  /// projections by 2: with the spec's, an fp32 run of the reference itself is 3e-5 off its fp64
  /// run.
  template <typename Normal, typename Uniform, typename Fill>
  void parity(const TensorEntry& entry, double fan_in, Normal&& normal, Uniform&& uniform,
              Fill&& fill, Rng& rng) const {
    const double unit = 1.0 / std::sqrt(fan_in);
    switch (entry.role) {
      case kEmbedding:
        return normal(1.0);
      case kNorm:
        return fill([&] { return 1.0 + 0.2 * rng.normal(); });
      case kResProj:
        return normal(0.5 / std::sqrt(static_cast<double>(preset_.config.hidden_size)));
      case kConv:
        return normal(0.5);
      case kALog:
        return fill([&] { return std::log(0.5 + 3.5 * rng.uniform()); });
      case kDtBias:
        return uniform(-2.0, 2.0);
      case kRouterBias:
        return uniform(-0.3, 0.3);
      case kRouter:
        return normal(3.0 * unit);
      case kMlpIn:
      case kExpertIn:
        return normal(4.0 * unit);
      case kAttentionOut:
      case kMlpOut:
      case kExpertOut:
        return normal(0.5 * unit);
      case kHead:
      case kAttention:
      case kLatentDown:
      case kLatentUp:
        return normal(unit);
    }
  }

  /// Small latents before the MLA norms, so that their epsilon (1e-6, not 1e-5) is visible in the
  /// logits.
  void shrink_latents(const TensorEntry& entry, std::span<float> values) const {
    constexpr float kShrink = 1.0F / 32;
    const bool q = entry.name.ends_with("q_a_proj.weight");
    const bool kv = entry.name.ends_with("kv_a_proj_with_mqa.weight");
    const std::int64_t rows = q ? entry.shape[0] : kv ? preset_.config.kv_lora_rank : 0;
    for (float& value : values.first(usize(rows * entry.shape.back()))) {
      value *= kShrink;
    }
  }

  const Preset& preset_;
  std::uint64_t seed_;
};

/// Writes one table entry as it is stored.
class Encoder {
 public:
  explicit Encoder(const InitOptions& options) : options_(options) {}

  void write(SafetensorsWriter& writer, const TensorEntry& entry,
             std::span<const float> values) const {
    const std::vector<TensorSpec> parts = stored_parts(entry, options_);
    const auto put = [&](std::size_t part, const auto& data) {
      writer.write(parts[part].name, std::as_bytes(std::span(data)));
    };
    const ConstF32Mat matrix{values.data(), {entry.shape[0], isize(values) / entry.shape[0]}};
    if (is_mxfp4(entry, options_)) {
      const MxFp4Matrix q = quantise_mxfp4(matrix).value_or_throw();
      put(0, q.packed);
      put(1, q.scale);
    } else if (is_nvfp4(entry, options_)) {
      const NvFp4Matrix q = quantise_nvfp4(matrix).value_or_throw();
      put(0, q.packed);
      put(1, q.scale);
      put(2, std::vector<float>{q.scale_2});
      put(3, std::vector<float>{1.0F});
    } else if (is_fp8(entry, options_)) {
      const Fp8BlockMatrix q = quantise_fp8_block(matrix).value_or_throw();
      put(0, q.codes);
      put(1, q.scale);
    } else if (parts[0].dtype == DType::kBF16) {
      std::vector<BF16> rounded(values.size());
      std::ranges::transform(values, rounded.begin(), &BF16::from_float);
      put(0, rounded);
    } else {
      put(0, values);
    }
  }

 private:
  InitOptions options_;
};

}  // namespace

void write_initial_checkpoint(const Preset& preset, const InitOptions& options,
                              const std::string& dir,
                              const std::function<void(double done)>& progress) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error) {
    throw_error("{}: cannot create the folder: {}", dir, error.message());
  }
  const std::vector<TensorEntry> table = tensor_table(preset.config, preset.a_log_length);
  const Encoder encoder(options);
  std::vector<TensorSpec> specs;
  for (const TensorEntry& entry : table) {
    const auto parts = stored_parts(entry, options);
    specs.insert(specs.end(), parts.begin(), parts.end());
  }
  SafetensorsWriter writer(dir + "/model.safetensors", std::move(specs), {{"format", "pt"}});
  const Initializer initializer(preset, options.seed);
  for (std::size_t i = 0; i < table.size(); ++i) {
    encoder.write(writer, table[i], initializer.values(table[i]));
    if (progress) {
      progress(static_cast<double>(i + 1) / static_cast<double>(table.size()));
    }
  }
  writer.finish();
  Config config = preset.config;
  config.dtype = options.bf16 ? "bfloat16" : "float32";
  write_file_atomic(dir + "/config.json", config.to_json());
}

}  // namespace tandem::kimi_k3
