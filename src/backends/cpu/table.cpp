#include <hwy/highway.h>

#include "backends/cpu/cpu_backend.h"
#include "backends/cpu/families.h"
#include "backends/cpu/simd_targets.h"

namespace tandem {

const OpTable& cpu_backend() {
  static const OpTable table = [] {
    OpTable ops;
    ops.name = "cpu";
    ops.gemm = cpu_gemm_ops();
    ops.act = cpu_act_ops();
    ops.attn_res = cpu_attn_res_ops();
    ops.conv = cpu_conv_ops();
    ops.embed = cpu_embed_ops();
    ops.loss = cpu_loss_ops();
    ops.norm = cpu_norm_ops();
    ops.kda = cpu_kda_ops();
    ops.mla = cpu_mla_ops();
    cpu_add_expert_ops(ops.moe);
    ops.optim = cpu_optim_ops();
    cpu_add_router_ops(ops.moe);
    ops.sample = cpu_sample_ops();
    cpu_add_sample_rule_ops(ops.sample);
    return ops;
  }();
  return table;
}

std::string cpu_instruction_set() {
  // As Highway's dispatch does: the best, which is the lowest bit, of what is compiled and there.
  const std::int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(usable & -usable);
}

}  // namespace tandem
