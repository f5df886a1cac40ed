// activations.h — how layers look at their activations. A layer's forward puts what its backward
// needs into the arena it is given: the trainer's activation arena in training, a scope of the
// workspace (dropped at once) in inference. The code is the same.
#pragma once

#include "tensor/arena_views.h"

namespace tandem::nn {

/// [T, H * W] seen as [T, H, W].
template <typename T>
[[nodiscard]] TensorView<T, 3> as_heads(TensorView<T, 2> x, std::int64_t num_heads) {
  const std::int64_t width = x.size(1) / num_heads;
  return {x.data(), {x.size(0), num_heads, width}, {x.stride(0), width, 1}};
}
/// [T, H, W] with packed heads seen as [T, H * W].
template <typename T>
[[nodiscard]] TensorView<T, 2> flatten_heads(TensorView<T, 3> x) {
  return {x.data(), {x.size(0), x.size(1) * x.size(2)}, {x.stride(0), 1}};
}

}  // namespace tandem::nn
