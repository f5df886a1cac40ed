// ldmatrix.cuh — fragments of 8 x 8 matrices of 16-bit elements from shared memory.
// PTX ISA 6.5, sm_75. All 32 lanes must call. Lane 8 i + r gives the 16-byte aligned address of row
// r of matrix i.
#pragma once

#include <cstdint>

namespace tandem::cuda::ptx {

/// ldmatrix.x4: d[i] of lane l is elements 2 (l % 4) and + 1 of row l / 4 of matrix i.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

/// ldmatrix.x4.trans: d[i] of lane l is column l / 4 of matrix i, rows 2 (l % 4) and + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

}  // namespace tandem::cuda::ptx
