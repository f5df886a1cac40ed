// tensor_experts_bf16.cu — experts_kernels.cuh for one weight format.
#include "backends/cuda/experts/experts_kernels.cuh"

namespace tandem::cuda {

template void launch_gate_up<WeightFormat::kBF16>(const ExecCtx&, const ExpertsConfig&,
                                                  const GateUpArgs&);
template void launch_down<WeightFormat::kBF16>(const ExecCtx&, const ExpertsConfig&,
                                               const DownArgs&);

}  // namespace tandem::cuda
