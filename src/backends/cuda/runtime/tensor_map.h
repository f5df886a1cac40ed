// tensor_map.h — what the bulk copy engine must know of a matrix to copy boxes of it.
#pragma once

#include <cstdint>

#include <cuda.h>

namespace tandem::cuda {

/// A matrix of 16-bit elements in device memory, copied in boxes of `box_rows` rows by 64 columns;
/// in shared memory a row of a box is 128 bytes, its 16-byte chunks swizzled (ptx/wgmma.cuh).
struct BoxedMatrix {
  const void* data = nullptr;  // 16-byte aligned
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_bytes = 0;  // from one row to the next, a multiple of 16
  int box_rows = 0;
};

/// Errors: throws Error when the driver refuses.
[[nodiscard]] CUtensorMap make_tensor_map(const BoxedMatrix& matrix);

}  // namespace tandem::cuda
