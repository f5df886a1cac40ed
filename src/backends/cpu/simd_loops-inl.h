// simd_loops-inl.h — loops over a row of floats: whole vectors, then one partial vector. Compiled
// once per target: include after hwy/highway.h. A tail runs the same vector code with zeros in the
// unused lanes, so an element's result does not depend on where the row ends.
#if defined(TDM_CPU_SIMD_LOOPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TDM_CPU_SIMD_LOOPS_INL_H_
#undef TDM_CPU_SIMD_LOOPS_INL_H_
#else
#define TDM_CPU_SIMD_LOOPS_INL_H_
#endif

#include <cstddef>
#include <cstring>
#include <span>

#include "backends/cpu/row_blocks.h"
#include "core/checked_cast.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

/// A whole vector of a row.
struct Full {
  HWY_INLINE FloatVec load(const float* p) const { return hn::LoadU(FloatTag(), p); }
  HWY_INLINE void store(FloatVec v, float* p) const { hn::StoreU(v, FloatTag(), p); }
};

/// The last `count` < Lanes() elements of a row. Unused lanes load as 0 and are not stored.
struct Tail {
  std::size_t count;

  HWY_INLINE FloatVec load(const float* p) const {
    const FloatTag d;
#if HWY_MEM_OPS_MIGHT_FAULT
    HWY_ALIGN float buffer[HWY_MAX_BYTES / sizeof(float)] = {};
    std::memcpy(buffer, p, count * sizeof(float));
    return hn::Load(d, buffer);
#else
    return hn::MaskedLoad(hn::FirstN(d, count), d, p);
#endif
  }
  HWY_INLINE void store(FloatVec v, float* p) const {
    const FloatTag d;
#if HWY_MEM_OPS_MIGHT_FAULT
    HWY_ALIGN float buffer[HWY_MAX_BYTES / sizeof(float)];
    hn::Store(v, d, buffer);
    std::memcpy(p, buffer, count * sizeof(float));
#else
    hn::BlendedStore(v, hn::FirstN(d, count), d, p);
#endif
  }
};

/// fn(i, part) for the vectors at i = 0, N, 2N, ...; part is Full or, at most once, Tail.
template <class Fn>
HWY_INLINE void for_each_vector(std::size_t n, const Fn& fn) {
  const std::size_t lanes = hn::Lanes(FloatTag());
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    fn(i, Full{});
  }
  if (i < n) {
    fn(i, Tail{n - i});
  }
}

/// Sum over a row: acc = step(acc, i, part) on four interleaved accumulators, combined in one fixed
/// order that depends on n alone.
template <class Fn>
HWY_INLINE float row_sum(std::size_t n, const Fn& step) {
  const FloatTag d;
  const std::size_t lanes = hn::Lanes(d);
  FloatVec a0 = hn::Zero(d);
  FloatVec a1 = hn::Zero(d);
  FloatVec a2 = hn::Zero(d);
  FloatVec a3 = hn::Zero(d);
  std::size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    a0 = step(a0, i, Full{});
    a1 = step(a1, i + lanes, Full{});
    a2 = step(a2, i + 2 * lanes, Full{});
    a3 = step(a3, i + 3 * lanes, Full{});
  }
  for (; i + lanes <= n; i += lanes) {
    a0 = step(a0, i, Full{});
  }
  if (i < n) {
    a1 = step(a1, i, Tail{n - i});
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a0, a1), hn::Add(a2, a3))));
}

HWY_INLINE float row_dot(const float* a, const float* b, std::size_t n) {
  return row_sum(n, [&](FloatVec acc, std::size_t i, auto part)
                        HWY_ATTR { return hn::MulAdd(part.load(a + i), part.load(b + i), acc); });
}

/// y += x.
HWY_INLINE void row_add(float* y, const float* x, std::size_t n) {
  for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
    part.store(hn::Add(part.load(y + i), part.load(x + i)), y + i);
  });
}

/// sum[j] += partials[0][j] + partials[1][j] + ..., blocks in order for every j.
inline void add_partials(const ExecCtx& ctx, float* sum, std::span<const float> partials,
                         std::size_t n) {
  constexpr std::int64_t kColsPerBlock = 1024;
  const std::size_t count = n == 0 ? 0 : partials.size() / n;
  const RowBlocks cols{static_cast<std::int64_t>(n), kColsPerBlock};
  parallel_rows(ctx, cols, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    const std::size_t first = usize(begin);
    for (std::size_t b = 0; b < count; ++b) {
      row_add(sum + first, &partials[b * n + first], usize(end) - first);
    }
  });
}

}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
