#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/families.h"

namespace tandem {

const OpTable& cuda_backend() {
  static const OpTable table = [] {
    OpTable ops;
    ops.name = "cuda";
    ops.act = cuda::act_ops();
    ops.attn_res = cuda::attn_res_ops();
    ops.conv = cuda::conv_ops();
    ops.embed = cuda::embed_ops();
    ops.gemm = cuda::gemm_ops();
    cuda::add_kda_decode_ops(ops.kda);
    cuda::add_kda_gate_ops(ops.kda);
    cuda::add_kda_recurrent_ops(ops.kda);
    ops.loss = cuda::loss_ops();
    ops.mla = cuda::mla_ops();
    cuda::add_expert_ops(ops.moe);
    cuda::add_router_ops(ops.moe);
    ops.norm = cuda::norm_ops();
    ops.optim = cuda::optim_ops();
    ops.sample = cuda::sample_ops();
    cuda::add_sample_rule_ops(ops.sample);
    return ops;
  }();
  return table;
}

}  // namespace tandem
