// attn_res.cuh — what the forward and backward of Attention Residuals share: sources by value, and
// the softmax over them.
#pragma once

#include <cmath>
#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/reduce.cuh"

namespace tandem::cuda {

constexpr int kMaxSources = 32;  // of ops/attn_res.h; one lane of a warp each

struct Sources {
  Mat<const float> at[kMaxSources];
  int count = 0;
};

/// Of one source: scale r, score s and weight p.
struct SourceWeight {
  float r;
  float s;
  float p;
};

/// The weights of all sources, one a lane of the warp; lanes that are not `used` get p = 0.
__device__ __forceinline__ SourceWeight softmax_weights(float squares, float dot, std::int64_t dim,
                                                        float eps, bool used) {
  const float r = 1.0F / sqrtf((used ? squares : 0.0F) / static_cast<float>(dim) + eps);
  const float s = used ? r * dot : -INFINITY;
  const float top = warp_max(s);
  const float e = used ? expf(s - top) : 0.0F;
  return {r, s, e / warp_sum(e)};
}

}  // namespace tandem::cuda
