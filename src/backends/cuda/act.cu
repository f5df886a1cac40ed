// act.cu — element-wise activations.   Contract: ops/act.h   Oracle: ops/ref/act_ref.h
// Traffic   each operand once; memory bound.   Numerics  fp32, full-precision exp and tanh.
// Launch    one thread an element of a row, grid-stride over rows; graph-safe.
#include <algorithm>
#include <cmath>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/families.h"
#include "backends/cuda/runtime/cuda_device.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;

/// Runs fn(row, col) for every element of [rows, cols].
template <typename Fn>
__global__ void __launch_bounds__(kThreads)
    each_element(std::int64_t rows, std::int64_t cols, const Fn fn) {
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (col >= cols) {
    return;
  }
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    fn(row, col);
  }
}

template <typename Fn>
void launch_each(const ExecCtx& ctx, const char* op, std::int64_t rows, std::int64_t cols,
                 const Fn& fn) {
  if (rows == 0 || cols == 0) {
    return;
  }
  const dim3 grid(static_cast<unsigned>((cols + kThreads - 1) / kThreads),
                  static_cast<unsigned>(std::min<std::int64_t>(rows, 65535)));
  each_element<<<grid, kThreads, 0, stream_of(ctx)>>>(rows, cols, fn);
  device_of(ctx).launched(op);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

struct Situ {
  Mat<float> y;
  Mat<const float> gate, up;
  SituParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    const float g = gate.row(r)[c];
    const float u = up.row(r)[c];
    const float a = p.beta * tanhf(g / p.beta) * sigmoid(g);
    const float b = p.linear_beta > 0 ? p.linear_beta * tanhf(u / p.linear_beta) : u;
    y.row(r)[c] = a * b;
  }
};

void situ(const ExecCtx& ctx, F32Mat y, ConstF32Mat gate, ConstF32Mat up, SituParams params) {
  launch_each(ctx, "situ", y.size(0), y.size(1),
              Situ{device_mat(y), device_mat(gate), device_mat(up), params});
}

}  // namespace

ActOps act_ops() {
  ActOps ops{};
  ops.situ = situ;
  return ops;
}

}  // namespace tandem::cuda
