// cuda_gemm_bench.cuh — random packed weights and an fp64 reference for cuda_gemm_bench, on the
// device.
#pragma once

#include <cstdint>

#include "backends/cuda/gemm/plan.h"
#include "ops/act.h"
#include "tensor/dtype.h"

namespace tandem::cuda::bench {

constexpr int kThreads = 256;

__device__ inline std::uint32_t hash(std::uint64_t i, std::uint32_t seed) {
  std::uint64_t z = (i + (std::uint64_t{seed} << 40)) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<std::uint32_t>(z >> 32);
}

/// What a 32-bit word of random bits becomes.
enum class Fill { kBf16, kE4m3, kFp4, kE4m3Scales, kE8m0Scales, kFp32Scales, kActivations };

__device__ inline std::uint32_t filled(Fill fill, std::uint32_t h) {
  switch (fill) {
    case Fill::kBf16:  // magnitudes 2^-9 .. 2^-7
      return (h & 0x83FF83FFU) | 0x3B003B00U;
    case Fill::kE4m3:  // no NaN: not all of the low seven bits set
      return h & 0xFDFDFDFDU;
    case Fill::kFp4:
      return h;
    case Fill::kE4m3Scales:  // 0.25 .. 3.75
      return (h & 0x1F1F1F1FU) + 0x28282828U;
    case Fill::kE8m0Scales:  // 2^-7 .. 1
      return (h & 0x07070707U) + 0x78787878U;
    case Fill::kFp32Scales:
      return __float_as_uint(0.001F + static_cast<float>(h) * 0x1p-40F);
    case Fill::kActivations:
      return __float_as_uint(static_cast<float>(h) * 0x1p-31F - 1.0F);
  }
  return 0;
}

__global__ void fill_kernel(std::uint32_t* to, std::int64_t words, Fill fill, std::uint32_t seed) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words; i += step) {
    to[i] = filled(fill, hash(static_cast<std::uint64_t>(i), seed));
  }
}

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

/// Counts words that differ.
__global__ void __launch_bounds__(kThreads)
    differ_kernel(const std::uint32_t* a, const std::uint32_t* b, std::int64_t words,
                  unsigned* count) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words; i += step) {
    if (a[i] != b[i]) {
      atomicAdd(count, 1U);
    }
  }
}

}  // namespace tandem::cuda::bench
