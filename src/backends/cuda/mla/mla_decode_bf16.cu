// mla_decode_bf16.cu — the Hopper kernel of absorbed MLA for bf16 rows: mla_decode_kernel.cuh.
#include "backends/cuda/mla/mla_decode_kernel.cuh"

namespace tandem::cuda {

DecodeKernel decode_kernel_bf16(const DecodeConfig& config) {
  return decode_kernel<LatentFormat::kBF16>(config);
}

}  // namespace tandem::cuda
