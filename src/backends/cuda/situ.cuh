// situ.cuh — SiTU of one gate and one up value.   Source: ops/act.h
#pragma once

#include <cmath>

#include "backends/cuda/sigmoid.cuh"
#include "ops/act.h"

namespace tandem::cuda {

__device__ __forceinline__ float situ_value(float gate, float up, const SituParams& p) {
  const float gated = sigmoid(gate);
  const float a = p.beta * tanhf(gate / p.beta) * gated;
  const float b = p.linear_beta > 0 ? p.linear_beta * tanhf(up / p.linear_beta) : up;
  return a * b;
}

}  // namespace tandem::cuda
