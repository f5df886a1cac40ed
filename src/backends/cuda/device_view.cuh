// device_view.cuh — TensorView as a kernel argument: pointer and strides, nothing to check.
#pragma once

#include <cstdint>

#include "tensor/view.h"

namespace tandem::cuda {

template <typename T>
struct Mat {  // [rows, cols], the last axis contiguous
  T* data;
  std::int64_t stride;
  __device__ T* row(std::int64_t i) const { return data + i * stride; }
};

template <typename T>
struct Cube {  // [A, B, C], the last axis contiguous
  T* data;
  std::int64_t stride_a;
  std::int64_t stride_b;
  __device__ T* row(std::int64_t a, std::int64_t b) const {
    return data + a * stride_a + b * stride_b;
  }
};

template <typename T>
[[nodiscard]] Mat<T> device_mat(const TensorView<T, 2>& view) {
  return {view.data(), view.stride(0)};
}
template <typename T>
[[nodiscard]] Cube<T> device_cube(const TensorView<T, 3>& view) {
  return {view.data(), view.stride(0), view.stride(1)};
}

}  // namespace tandem::cuda
