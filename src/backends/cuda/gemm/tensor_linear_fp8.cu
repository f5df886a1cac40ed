// tensor_linear_fp8.cu — linear_kernels.cuh and group_kernels.cuh for one weight format.
#include "backends/cuda/gemm/group_kernels.cuh"
#include "backends/cuda/gemm/linear_kernels.cuh"

namespace tandem::cuda {

template void launch_linear<WeightFormat::kFp8Block>(const ExecCtx&, const LinearConfig&,
                                                     const TensorLinearArgs&, int);
template void launch_linear_sum<WeightFormat::kFp8Block>(const ExecCtx&, const LinearConfig&,
                                                         const LinearSumArgs&, int);
template void launch_linear_group<WeightFormat::kFp8Block>(const ExecCtx&, const LinearConfig&,
                                                           const LinearGroupArgs&);

}  // namespace tandem::cuda
