// attn_math-inl.h — vector pieces that KDA and MLA share: loads of a row's last lanes, and the
// sum of four vectors' lanes. Included once per SIMD target by foreach_target.
//
// Every function is element-wise or has one fixed tree, so a value does not depend on which lane,
// tile or call computes it.

#if defined(TANDEM_BACKENDS_CPU_ATTN_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_BACKENDS_CPU_ATTN_MATH_INL_H_
#undef TANDEM_BACKENDS_CPU_ATTN_MATH_INL_H_
#else
#define TANDEM_BACKENDS_CPU_ATTN_MATH_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "backends/cpu/simd_math-inl.h"
#include "core/checked_cast.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;
inline constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(FloatTag()));
// Masked-off lanes are never touched in memory on targets where a masked access cannot fault.
inline constexpr bool kMaskedMemory = HWY_MEM_OPS_MIGHT_FAULT == 0;

HWY_INLINE constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// The first `count` (1..kLanes) floats at p; the other lanes are 0 and their memory is not read.
HWY_INLINE FloatVec load_first(const float* p, std::int64_t count) {
  const FloatTag d;
  if (count >= kLanes) {
    return hn::LoadU(d, p);
  }
  if constexpr (kMaskedMemory) {
    return hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(count)), d, p);
  } else {
    alignas(64) float lanes[kLanes] = {};
    std::copy(p, p + count, lanes);
    return hn::Load(d, lanes);
  }
}

/// Stores the first `count` (1..kLanes) lanes.
HWY_INLINE void store_first(FloatVec x, float* p, std::int64_t count) {
  const FloatTag d;
  if (count >= kLanes) {
    hn::StoreU(x, d, p);
    return;
  }
  if constexpr (kMaskedMemory) {
    hn::BlendedStore(x, hn::FirstN(d, static_cast<std::size_t>(count)), d, p);
  } else {
    alignas(64) float lanes[kLanes];
    hn::Store(x, d, lanes);
    std::copy(lanes, lanes + count, p);
  }
}

/// Copies a short row: whole vectors and a masked rest, without the call that memmove costs.
HWY_INLINE void copy_row(const float* from, std::int64_t count, float* to) {
  std::int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    hn::StoreU(hn::LoadU(FloatTag(), from + c), FloatTag(), to + c);
  }
  if (c < count) {
    store_first(load_first(from + c, count - c), to + c, count - c);
  }
}

#if HWY_TARGET == HWY_SCALAR  // one lane: nothing to sum

HWY_INLINE void sum_lanes_4(FloatVec a, FloatVec b, FloatVec c, FloatVec e, float* out) {
  out[0] = hn::GetLane(a);
  out[1] = hn::GetLane(b);
  out[2] = hn::GetLane(c);
  out[3] = hn::GetLane(e);
}

#else

template <class D>
HWY_INLINE hn::Vec<hn::FixedTag<float, 4> > fold_blocks(D d, hn::Vec<D> x) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return x;
  } else {
    const hn::Half<D> half;
    return fold_blocks(half, hn::Add(hn::LowerHalf(half, x), hn::UpperHalf(half, x)));
  }
}

/// out[i] = sum of the lanes of the i-th argument; the same tree for each.
HWY_INLINE void sum_lanes_4(FloatVec a, FloatVec b, FloatVec c, FloatVec e, float* out) {
  const FloatTag d;
  const hn::Repartition<double, FloatTag> pairs;
  const FloatVec ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const FloatVec ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto ab2 = hn::BitCast(pairs, ab);
  const auto ce2 = hn::BitCast(pairs, ce);
  const FloatVec sums = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, ab2, ce2)),
                                hn::BitCast(d, hn::InterleaveUpper(pairs, ab2, ce2)));
  hn::StoreU(fold_blocks(d, sums), hn::FixedTag<float, 4>(), out);
}

#endif

HWY_INLINE float sum_lanes(FloatVec a) {
  float out[4];
  sum_lanes_4(a, a, a, a, out);
  return out[0];
}

}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
