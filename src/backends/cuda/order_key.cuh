// order_key.cuh — floats as unsigned integers of the same order.
#pragma once

#include <cstdint>

namespace tandem::cuda {

/// a < b as floats exactly when order_key(a) < order_key(b); -0 and +0 have one key. Not for NaN.
/// Every key is above 0, so that 0 can stand for "none".
__device__ __forceinline__ std::uint32_t order_key(float value) {
  const std::uint32_t bits = __float_as_uint(value + 0.0F);  // -0 becomes +0
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

__device__ __forceinline__ float value_of_order_key(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000U) != 0 ? key & 0x7FFFFFFFU : ~key);
}

}  // namespace tandem::cuda
