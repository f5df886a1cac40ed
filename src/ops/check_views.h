// check_views.h — what the op wrappers check before they call a backend.
#pragma once

#include "tensor/view.h"

namespace tandem {

/// True when the elements of a row (last axis) are adjacent.
template <typename T, int Rank>
[[nodiscard]] bool rows_contiguous(TensorView<T, Rank> view) {
  return view.size(Rank - 1) <= 1 || view.stride(Rank - 1) == 1;
}

template <typename A, typename B, int Rank>
[[nodiscard]] bool same_shape(TensorView<A, Rank> a, TensorView<B, Rank> b) {
  return a.shape() == b.shape();
}

/// Same shape as `like` and rows contiguous.
template <typename A, typename B, int Rank>
[[nodiscard]] bool rows_like(TensorView<A, Rank> view, TensorView<B, Rank> like) {
  return same_shape(view, like) && rows_contiguous(view);
}

/// A contiguous vector of `size` elements.
template <typename T>
[[nodiscard]] bool vec_of(TensorView<T, 1> view, std::int64_t size) {
  return view.size(0) == size && rows_contiguous(view);
}

}  // namespace tandem
