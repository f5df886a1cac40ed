// mla_decode_fp8.cu — the Hopper kernel of absorbed MLA for fp8 (e4m3) rows: mla_decode_kernel.cuh.
#include "backends/cuda/mla/mla_decode_kernel.cuh"

namespace tandem::cuda {

DecodeKernel decode_kernel_fp8(const DecodeConfig& config) {
  return decode_kernel<LatentFormat::kFp8>(config);
}

}  // namespace tandem::cuda
