// to_bf16.cu — fp32 rows to bf16 rows of a padded width.   Contract: gemm/to_bf16.h
// Traffic   6 bytes an element; memory bound.   Numerics  round to nearest even.
// Launch    one thread 8 elements, grid-stride over rows; graph-safe.
#include <algorithm>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/gemm/to_bf16.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/ptx/mma.cuh"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kPerThread = 8;

struct Args {
  std::uint16_t* to;
  std::int64_t width;
  Cube<const float> x;  // [rows / heads, heads, in]
  std::int64_t rows;
  std::int64_t heads;
  std::int64_t in;
  bool vectors;  // every row of x is aligned to 16 bytes
};

__global__ void __launch_bounds__(kThreads) to_bf16_kernel(const Args p) {
  begin_kernel();
  const std::int64_t k =
      (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPerThread;
  if (k >= p.width) {
    return;
  }
  for (std::int64_t r = blockIdx.y; r < p.rows; r += gridDim.y) {
    const float* from = p.x.row(r / p.heads, r % p.heads) + k;
    float v[kPerThread];
    if (p.vectors && k + kPerThread <= p.in) {
      const float4 low = reinterpret_cast<const float4*>(from)[0];
      const float4 high = reinterpret_cast<const float4*>(from)[1];
      v[0] = low.x;
      v[1] = low.y;
      v[2] = low.z;
      v[3] = low.w;
      v[4] = high.x;
      v[5] = high.y;
      v[6] = high.z;
      v[7] = high.w;
    } else {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        v[i] = k + i < p.in ? from[i] : 0.0F;
      }
    }
    *reinterpret_cast<uint4*>(p.to + r * p.width + k) =
        make_uint4(ptx::cvt_bf16x2(v[0], v[1]), ptx::cvt_bf16x2(v[2], v[3]),
                   ptx::cvt_bf16x2(v[4], v[5]), ptx::cvt_bf16x2(v[6], v[7]));
  }
}

}  // namespace

void to_bf16(const ExecCtx& ctx, std::uint16_t* to, std::int64_t width, ConstF32Cube x) {
  const std::int64_t rows = x.size(0) * x.size(1);
  if (rows == 0 || width == 0) {
    return;
  }
  const bool vectors = reinterpret_cast<std::uintptr_t>(x.data()) % 16 == 0 &&
                       (x.size(0) == 1 || x.stride(0) % 4 == 0) &&
                       (x.size(1) == 1 || x.stride(1) % 4 == 0);
  const std::int64_t columns = (width / kPerThread + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(columns),
                  static_cast<unsigned>(std::min<std::int64_t>(rows, 65535)));
  launch(ctx, "to_bf16", to_bf16_kernel, {grid, kThreads},
         Args{to, width, device_cube(x), rows, x.size(1), x.size(2), vectors});
}

}  // namespace tandem::cuda
