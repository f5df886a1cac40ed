// families.h — one function a family: its entries of the CPU op table, for this machine's widest
// supported instruction set.
#pragma once

#include "ops/op_table.h"

namespace tandem {

GemmOps cpu_gemm_ops();
ActOps cpu_act_ops();
AttnResOps cpu_attn_res_ops();
ConvOps cpu_conv_ops();
EmbedOps cpu_embed_ops();
LossOps cpu_loss_ops();
NormOps cpu_norm_ops();
KdaOps cpu_kda_ops();
MlaOps cpu_mla_ops();
void cpu_add_expert_ops(MoeOps& ops);  // experts, experts_bwd
OptimOps cpu_optim_ops();
void cpu_add_router_ops(MoeOps& ops);  // route, route_replay, route_bwd
SampleOps cpu_sample_ops();
void cpu_add_sample_rule_ops(SampleOps& ops);  // adjust_logits, top_tokens

}  // namespace tandem
