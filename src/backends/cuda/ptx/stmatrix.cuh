// stmatrix.cuh — fragments of 8 x 8 matrices of 16-bit elements into shared memory.
// PTX ISA 7.8, sm_90. All 32 lanes must call. Lane 8 i + r gives the 16-byte aligned address of row
// r of matrix i.
#pragma once

#include <cstdint>

namespace tandem::cuda::ptx {

/// stmatrix.x2.trans: d[i] of lane l becomes column l / 4 of matrix i, rows 2 (l % 4) and + 1.
__device__ __forceinline__ void stmatrix_x2_trans(void* row, std::uint32_t low,
                                                  std::uint32_t high) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               :
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row))), "r"(low), "r"(high)
               : "memory");
}

}  // namespace tandem::cuda::ptx
