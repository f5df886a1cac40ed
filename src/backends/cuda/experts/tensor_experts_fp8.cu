// tensor_experts_fp8.cu — experts_kernels.cuh for one weight format.
#include "backends/cuda/experts/experts_kernels.cuh"

namespace tandem::cuda {

template void launch_gate_up<WeightFormat::kFp8Block>(const ExecCtx&, const ExpertsConfig&,
                                                      const GateUpArgs&);
template void launch_down<WeightFormat::kFp8Block>(const ExecCtx&, const ExpertsConfig&,
                                                   const DownArgs&);

}  // namespace tandem::cuda
