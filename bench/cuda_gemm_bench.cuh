// cuda_gemm_bench.cuh — random packed weights and an fp64 reference for cuda_gemm_bench, on the
// device.
#pragma once

#include <cstdint>

#include "backends/cuda/gemm/plan.h"
#include "cuda_bench.cuh"
#include "ops/act.h"
#include "tensor/dtype.h"

namespace tandem::cuda::bench {

__global__ void set_kernel(float* to, float value) {
  *to = value;
}

__device__ inline double e2m1(unsigned code) {
  const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const double value = magnitude[code & 7U];
  return (code & 8U) != 0 ? -value : value;
}

__device__ inline double e4m3(unsigned code) {
  const int exponent = static_cast<int>(code >> 3 & 15U);
  const double fraction = code & 7U;
  const double value = exponent == 0 ? fraction * 0x1p-9 : ldexp(8 + fraction, exponent - 10);
  return (code & 0x80U) != 0 ? -value : value;
}

/// Weight (row, k), from where layout.h says it is.
__device__ inline double weight_at(WeightFormat format, const std::uint8_t* data,
                                   const TensorShape& shape, std::int64_t row, std::int64_t k) {
  const std::int64_t tile = row / 16 * shape.k_tiles + k / 64;
  const int place = place_in_tile(static_cast<int>(row % 16), static_cast<int>(k % 64));
  const int lane = place / 8 % 32;
  const int step = place / 256;
  const int index = place % 8;
  const std::uint8_t* element = data + tile * tile_bytes(format);
  const std::uint8_t* scales = data + shape.scales_offset;
  const int half_row = static_cast<int>(row % 8) * 2 + static_cast<int>(row % 16) / 8;
  switch (format) {
    case WeightFormat::kBF16:
      return BF16{reinterpret_cast<const std::uint16_t*>(element)[place]}.to_float();
    case WeightFormat::kFp8Block: {
      const float scale =
          reinterpret_cast<const float*>(scales)[row / 128 * shape.segments + k / 128];
      const int byte = (step / 2 * 32 + lane) * 16 + step % 2 * 8 + index;
      return e4m3(element[byte]) * scale;
    }
    case WeightFormat::kMxFp4:
    case WeightFormat::kNvFp4: {
      const std::uint32_t word = reinterpret_cast<const std::uint32_t*>(element)[lane * 4 + step];
      const double code = e2m1(fp4_code(word, index));
      if (format == WeightFormat::kMxFp4) {
        const int e8m0 = scales[tile * 32 + half_row * 2 + step / 2];
        return code * exp2(e8m0 - 127.0);
      }
      const float scale_2 = *reinterpret_cast<const float*>(data + shape.scale_2_offset);
      return code * e4m3(scales[tile * 64 + half_row * 4 + step]) * scale_2;
    }
    case WeightFormat::kF32:
      break;
  }
  return 0;
}

/// sum[0] = sum of bf16(x[k]) w[row, k], sum[1] of its absolute values; for all threads of a block.
__device__ inline void reference_dot(double (&sum)[2], WeightFormat format,
                                     const std::uint8_t* data, const TensorShape& shape,
                                     std::int64_t row, const float* x) {
  __shared__ double partial[2][kThreads];
  double signed_sum = 0;
  double magnitude = 0;
  for (std::int64_t k = threadIdx.x; k < shape.in; k += kThreads) {
    const double product =
        double{BF16::from_float(x[k]).to_float()} * weight_at(format, data, shape, row, k);
    signed_sum += product;
    magnitude += fabs(product);
  }
  __syncthreads();  // the sums of a call before are read
  partial[0][threadIdx.x] = signed_sum;
  partial[1][threadIdx.x] = magnitude;
  __syncthreads();
  sum[0] = sum[1] = 0;
  for (int i = 0; i < kThreads; ++i) {
    sum[0] += partial[0][i];
    sum[1] += partial[1][i];
  }
}

/// The largest |y - reference| / sum of magnitudes over blocks of sampled outputs.
struct Sample {
  WeightFormat format;
  const std::uint8_t* data;
  TensorShape shape;
  const float* x;  // [T, in]
  const float* y;  // [T, out]
  std::int64_t tokens;
  unsigned* worst;  // a non-negative float's bits
};
__global__ void __launch_bounds__(kThreads) check_kernel(const Sample p) {
  const std::int64_t row = hash(blockIdx.x, 1) % p.shape.out;
  const std::int64_t token = hash(blockIdx.x, 2) % p.tokens;
  double sum[2];
  reference_dot(sum, p.format, p.data, p.shape, row, p.x + token * p.shape.in);
  if (threadIdx.x == 0) {
    const double error = fabs(p.y[token * p.shape.out + row] - sum[0]) / (sum[1] + 1e-30);
    atomicMax(p.worst, __float_as_uint(static_cast<float>(isnan(error) ? 1e30 : error)));
  }
}

/// hidden[slot, f] of one token, a block an element, rounded to bf16.
struct HiddenSample {
  WeightFormat format;
  const std::uint8_t* const* w1;
  const std::uint8_t* const* w3;
  TensorShape shape;
  const std::int32_t* ids;
  const float* x;
  float* hidden;  // [A, F]
  SituParams act;
};
__global__ void __launch_bounds__(kThreads) hidden_kernel(const HiddenSample p) {
  const std::int64_t row = blockIdx.x;
  const std::int32_t expert = p.ids[blockIdx.y];
  double gate[2];
  double up[2];
  reference_dot(gate, p.format, p.w1[expert], p.shape, row, p.x);
  reference_dot(up, p.format, p.w3[expert], p.shape, row, p.x);
  if (threadIdx.x == 0) {
    const double a = p.act.beta * tanh(gate[0] / p.act.beta) / (1 + exp(-gate[0]));
    const double b = p.act.linear_beta * tanh(up[0] / p.act.linear_beta);
    p.hidden[blockIdx.y * p.shape.out + row] =
        BF16::from_float(static_cast<float>(a * b)).to_float();
  }
}

/// The same for a token's output, from its hidden rows.
struct OutSample {
  WeightFormat format;
  const std::uint8_t* const* w2;
  TensorShape shape;
  const std::int32_t* ids;
  const float* weights;
  int slots;
  const float* hidden;
  const float* out;
  unsigned* worst;
};
__global__ void __launch_bounds__(kThreads) check_out_kernel(const OutSample p) {
  const std::int64_t row = blockIdx.x;
  double total = 0;
  double magnitude = 0;
  for (int a = 0; a < p.slots; ++a) {
    double sum[2];
    reference_dot(sum, p.format, p.w2[p.ids[a]], p.shape, row, p.hidden + a * p.shape.in);
    total += p.weights[a] * sum[0];
    magnitude += fabs(p.weights[a]) * sum[1];
  }
  if (threadIdx.x == 0) {
    const double error = fabs(p.out[row] - total) / (magnitude + 1e-30);
    atomicMax(p.worst, __float_as_uint(static_cast<float>(isnan(error) ? 1e30 : error)));
  }
}

}  // namespace tandem::cuda::bench
