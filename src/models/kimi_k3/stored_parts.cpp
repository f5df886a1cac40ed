#include "models/kimi_k3/stored_parts.h"

#include "tensor/quant.h"

namespace tandem::kimi_k3 {
namespace {

bool is_expert(const TensorEntry& entry) {
  return entry.role == TensorRole::kExpertIn || entry.role == TensorRole::kExpertOut;
}

}  // namespace

bool is_mxfp4(const TensorEntry& entry, const InitOptions& options) {
  return is_expert(entry) && options.experts == ExpertFormat::kMxFp4;
}

bool is_nvfp4(const TensorEntry& entry, const InitOptions& options) {
  return is_expert(entry) && options.experts == ExpertFormat::kNvFp4;
}

bool is_fp8(const TensorEntry& entry, const InitOptions& options) {
  return options.fp8_attention &&
         (entry.role == TensorRole::kAttention || entry.role == TensorRole::kAttentionOut);
}

std::vector<TensorSpec> stored_parts(const TensorEntry& entry, const InitOptions& options) {
  const std::string base = entry.name.substr(0, entry.name.rfind(".weight"));
  const auto& shape = entry.shape;
  if (is_mxfp4(entry, options)) {
    return {{base + ".weight_packed", DType::kU8, {shape[0], shape[1] / 2}},
            {base + ".weight_scale", DType::kU8, {shape[0], shape[1] / kMxFp4Group}}};
  }
  if (is_nvfp4(entry, options)) {
    return {{base + ".weight", DType::kU8, {shape[0], shape[1] / 2}},
            {base + ".weight_scale", DType::kF8E4M3, {shape[0], shape[1] / kNvFp4Group}},
            {base + ".weight_scale_2", DType::kF32, {}},
            {base + ".input_scale", DType::kF32, {}}};
  }
  if (is_fp8(entry, options)) {
    const auto blocks = [](std::int64_t n) { return (n + kFp8Block - 1) / kFp8Block; };
    return {{base + ".weight", DType::kF8E4M3, shape},
            {base + ".weight_scale", DType::kF32, {blocks(shape[0]), 1, blocks(shape[1]), 1}}};
  }
  return {{entry.name, options.bf16 && !entry.always_f32() ? DType::kBF16 : DType::kF32, shape}};
}

}  // namespace tandem::kimi_k3
