#include "train/optimizer.h"

#include <cmath>
#include <cstring>

#include "ops/optim.h"
#include "train/lr_schedule.h"

namespace tandem {

bool Optimizer::decays(const nn::Parameter& parameter) {
  const std::string& name = parameter.name;
  return parameter.shape.size() == 2 && !name.ends_with("embed_tokens.weight") &&
         name.find("_res_proj.") == std::string::npos;
}

Optimizer::Optimizer(nn::ParameterStore& parameters, const OptimizerConfig& config,
                     std::int64_t planned_steps)
    : config_(config), planned_steps_(planned_steps) {
  for (nn::Parameter& parameter : parameters.all()) {
    Slot& slot = slots_.emplace_back();
    slot.parameter = &parameter;
    slot.weight_decay = decays(parameter) ? config.weight_decay : 0.0;
    // Muon is for hidden matrices: what decays, but for the head.
    const bool hidden_matrix = decays(parameter) && !parameter.name.ends_with("lm_head.weight");
    slot.rule = parameter.frozen                              ? Rule::kFrozen
                : config.optimizer == "muon" && hidden_matrix ? Rule::kMuon
                                                              : Rule::kAdamW;
    if (slot.rule != Rule::kFrozen) {
      slot.first = Storage(parameter.numel() * 4, parameter.value_storage.device());
    }
    if (slot.rule == Rule::kAdamW) {
      slot.second = Storage(parameter.numel() * 4, parameter.value_storage.device());
    }
  }
}

double Optimizer::grad_norm(const ExecCtx& ctx) const {
  double sum = 0;
  for (const Slot& slot : slots_) {
    if (slot.rule != Rule::kFrozen) {
      sum += ops::sum_squares(ctx, slot.parameter->grad());
    }
  }
  return std::sqrt(sum);
}

OptimizerStep Optimizer::step(const ExecCtx& ctx) {
  OptimizerStep result;
  result.grad_norm = grad_norm(ctx);
  result.lr = learning_rate(config_, planned_steps_, num_steps_ + 1);
  if (!std::isfinite(result.grad_norm)) {
    result.skipped = true;
    ++num_skipped_;
    return result;
  }
  ++num_steps_;
  const double clip = config_.clip_grad > 0 ? config_.clip_grad / (result.grad_norm + 1e-6) : 1.0;
  const auto grad_scale = static_cast<float>(std::min(clip, 1.0));
  for (Slot& slot : slots_) {
    nn::Parameter& parameter = *slot.parameter;
    if (slot.rule == Rule::kAdamW) {
      ops::adamw(ctx, parameter.value(), slot.first.as<float>(), slot.second.as<float>(),
                 parameter.grad(),
                 {static_cast<float>(result.lr), static_cast<float>(config_.adam_beta1),
                  static_cast<float>(config_.adam_beta2), static_cast<float>(config_.adam_eps),
                  static_cast<float>(slot.weight_decay), num_steps_, grad_scale});
    } else if (slot.rule == Rule::kMuon) {
      const F32Mat momentum{slot.first.as<float>().data(),
                            {parameter.shape[0], parameter.shape[1]}};
      MuonParams params;
      params.lr = static_cast<float>(result.lr);
      params.weight_decay = static_cast<float>(slot.weight_decay);
      params.grad_scale = grad_scale;
      ops::muon(ctx, parameter.value_mat(), momentum, parameter.grad_mat(), params);
    }
  }
  return result;
}

HostTensors Optimizer::state() const {
  HostTensors tensors;
  const auto add = [&](const Slot& slot, const char* prefix, const Storage& storage) {
    if (storage.size_bytes() > 0) {
      tensors.add({prefix + slot.parameter->name, DType::kF32, slot.parameter->shape}, storage);
    }
  };
  for (const Slot& slot : slots_) {
    add(slot, "first.", slot.first);
    add(slot, "second.", slot.second);
  }
  return tensors;
}

Status Optimizer::restore(const SafetensorsFile& file, std::int64_t num_steps,
                          std::int64_t num_skipped) {
  const HostTensors expected = state();
  for (const TensorInfo& wanted : expected.infos()) {
    const TensorInfo* found = file.find(wanted.name);
    if (found == nullptr || found->dtype != wanted.dtype || found->shape != wanted.shape) {
      return fail("{}: tensor {}: expected F32 {}", file.path(), wanted.name,
                  shape_text(wanted.shape));
    }
  }
  for (Slot& slot : slots_) {
    for (const auto& [prefix, storage] :
         {std::pair{"first.", &slot.first}, {"second.", &slot.second}}) {
      if (storage->size_bytes() > 0) {
        const TensorInfo* found = file.find(prefix + slot.parameter->name);
        storage->assign(found->bytes);
      }
    }
  }
  num_steps_ = num_steps;
  num_skipped_ = num_skipped;
  return Ok{};
}

}  // namespace tandem
