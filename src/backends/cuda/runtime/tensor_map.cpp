#include "backends/cuda/runtime/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "backends/cuda/runtime/check.h"
#include "core/check.h"

namespace tandem::cuda {
namespace {

/// The driver's function, found at run time: nothing links the driver.
PFN_cuTensorMapEncodeTiled_v12000 find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found),
        "finding cuTensorMapEncodeTiled");
  TDM_CHECK(found == cudaDriverEntryPointSuccess, static_cast<int>(found));
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

CUtensorMap make_tensor_map(const BoxedMatrix& matrix) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encode();
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.columns),
                               static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.row_bytes)};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(matrix.box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap map{};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix.data), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "describing boxes of rows");
  return map;
}

}  // namespace tandem::cuda
