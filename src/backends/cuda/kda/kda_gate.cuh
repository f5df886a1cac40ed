// kda_gate.cuh — one channel's log decay.   Source: ops/kda.h
#pragma once

#include <cmath>

#include "backends/cuda/sigmoid.cuh"
#include "ops/kda.h"

namespace tandem::cuda {

__device__ __forceinline__ float softplus(float x) {
  return x > 20.0F ? x : log1pf(expf(x));
}

/// A head's.
__device__ __forceinline__ float decay_rate(float a_log) {
  return expf(a_log);
}

/// z = f + dt_bias, rate = decay_rate().
__device__ __forceinline__ float log_decay(float z, float rate, const KdaGateParams& p) {
  return p.bounded ? p.lower_bound * sigmoid(rate * z) : -(rate * softplus(z));
}

}  // namespace tandem::cuda
