// tensor_linear_bf16.cu — linear_kernels.cuh for one weight format.
#include "backends/cuda/gemm/linear_kernels.cuh"

namespace tandem::cuda {

template void launch_linear<WeightFormat::kBF16>(const ExecCtx&, const LinearConfig&,
                                                 const TensorLinearArgs&, int);

}  // namespace tandem::cuda
