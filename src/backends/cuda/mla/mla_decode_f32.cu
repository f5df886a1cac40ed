// mla_decode_f32.cu — the Hopper kernel of absorbed MLA for f32 rows: mla_decode_kernel.cuh.
#include "backends/cuda/mla/mla_decode_kernel.cuh"

namespace tandem::cuda {

DecodeKernel decode_kernel_f32(const DecodeConfig& config) {
  return decode_kernel<LatentFormat::kF32>(config);
}

}  // namespace tandem::cuda
