// families.h — the op families of the CUDA backend, one function a source folder or file.
#pragma once

#include "ops/op_table.h"

namespace tandem::cuda {

[[nodiscard]] ActOps act_ops();
[[nodiscard]] AttnResOps attn_res_ops();
[[nodiscard]] ConvOps conv_ops();
[[nodiscard]] EmbedOps embed_ops();
[[nodiscard]] GemmOps gemm_ops();
void add_kda_decode_ops(KdaOps& ops);
void add_kda_gate_ops(KdaOps& ops);
void add_kda_recurrent_ops(KdaOps& ops);
[[nodiscard]] LossOps loss_ops();
[[nodiscard]] MlaOps mla_ops();
void add_expert_ops(MoeOps& ops);
void add_router_ops(MoeOps& ops);
[[nodiscard]] NormOps norm_ops();
[[nodiscard]] OptimOps optim_ops();
[[nodiscard]] SampleOps sample_ops();
void add_sample_rule_ops(SampleOps& ops);

}  // namespace tandem::cuda
