// op_work.h — what op wrappers tell a profiler about a call, in terms of its views.
#pragma once

#include <string>

#include <fmt/format.h>

#include "ops/gemm.h"
#include "ops/profiler.h"
#include "ops/seq_batch.h"
#include "tensor/view.h"

namespace tandem {

/// Bytes of the elements of a view, or of several together.
template <typename T, int Rank>
[[nodiscard]] double bytes_of(TensorView<T, Rank> view) {
  return static_cast<double>(view.numel()) * sizeof(T);
}
template <typename First, typename... Rest>
[[nodiscard]] double bytes_of(First first, Rest... rest) {
  return bytes_of(first) + (bytes_of(rest) + ...);
}
[[nodiscard]] inline double bytes_of(const PackedWeight& weight) {
  return static_cast<double>(weight.data.size_bytes() + weight.scales.size_bytes());
}

/// "16 x 7168"
template <typename T, int Rank>
[[nodiscard]] std::string shape_of(TensorView<T, Rank> view) {
  return fmt::format("{}", fmt::join(view.shape(), " x "));
}

/// An op that looks at each element of `x` a few times and moves `bytes` in all.
template <typename T, int Rank>
[[nodiscard]] OpWork elementwise_work(TensorView<T, Rank> x, double bytes) {
  OpWork work;
  work.shape = shape_of(x);
  work.bytes = bytes;
  return work;
}

/// Bytes of records of `elements` floats that each sequence reads and writes in its slot.
[[nodiscard]] inline double slot_bytes(const SeqBatch& seqs, std::int64_t elements) {
  return seqs.keeps_state() ? 2.0 * sizeof(float) * static_cast<double>(seqs.num_seqs() * elements)
                            : 0.0;
}

}  // namespace tandem
