// sigmoid.cuh — the logistic function in full fp32 precision.
#pragma once

#include <cmath>

namespace tandem::cuda {

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0F / (1.0F + expf(-x));
}

__device__ __forceinline__ float silu(float x) {
  return x * sigmoid(x);
}

/// sigmoid(x) and 1 - sigmoid(x), neither by subtraction.
struct SigmoidPair {
  float value;
  float complement;
};
__device__ __forceinline__ SigmoidPair sigmoid_pair(float x) {
  const float e = expf(-fabsf(x));
  const float large = 1.0F / (1.0F + e);
  const float small = e * large;
  return x >= 0 ? SigmoidPair{large, small} : SigmoidPair{small, large};
}

}  // namespace tandem::cuda
