// situ.cuh — SiTU of one gate and one up value.   Source: ops/act.h
#pragma once

#include "ops/act.h"

namespace tandem::cuda {

__device__ __forceinline__ float situ_value(float gate, float up, const SituParams& p) {
  const float sigmoid = 1.0F / (1.0F + expf(-gate));
  const float a = p.beta * tanhf(gate / p.beta) * sigmoid;
  const float b = p.linear_beta > 0 ? p.linear_beta * tanhf(up / p.linear_beta) : up;
  return a * b;
}

}  // namespace tandem::cuda
