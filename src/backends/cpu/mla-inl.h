// mla-inl.h — the online softmax over one tile of keys, on top of the tiles of attn_tiles-inl.h,
// and queries in one piece.
//
// The softmax sum has lane = key mod lanes; tiles of kKeyTile keys start at position 0 of the
// sequence, so the order of a row's operations depends on its number of visible keys alone.

#if defined(TANDEM_BACKENDS_CPU_MLA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_BACKENDS_CPU_MLA_INL_H_
#undef TANDEM_BACKENDS_CPU_MLA_INL_H_
#else
#define TANDEM_BACKENDS_CPU_MLA_INL_H_
#endif

#include <limits>

#include "backends/cpu/attn_tiles-inl.h"
#include "ops/mla.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {

/// The running softmax of one row.
struct SoftmaxRow {
  float top = -std::numeric_limits<float>::infinity();
  alignas(64) float sum[kLanes] = {};  // lane = key mod lanes
};

/// Scores s[0..valid) of one tile become weights e^(scale s - top) (0 after `valid` up to the end
/// of the vector); returns what the sums so far must be multiplied by (1 when top did not move).
HWY_INLINE float softmax_tile(float* s, std::int64_t valid, float scale, SoftmaxRow& row) {
  const FloatTag d;
  const FloatVec low = hn::Set(d, -std::numeric_limits<float>::infinity());
  const FloatVec factor = hn::Set(d, scale);
  FloatVec top = low;
  for (std::int64_t j = 0; j < valid; j += kLanes) {
    const auto live = hn::FirstN(d, static_cast<std::size_t>(std::min(kLanes, valid - j)));
    const FloatVec x = hn::IfThenElse(live, hn::Mul(factor, hn::LoadU(d, s + j)), low);
    hn::StoreU(x, d, s + j);
    top = hn::Max(top, x);
  }
  const float new_top = std::max(row.top, hn::GetLane(hn::MaxOfLanes(d, top)));
  // exp is kept away from -inf (no sums yet, dead lanes): its way to 0 passes through subnormal
  // numbers, which cost a hundred cycles each.
  const bool same = new_top == row.top || row.top == -std::numeric_limits<float>::infinity();
  const float correction = same ? 1.0F : hn::GetLane(vexp(d, hn::Set(d, row.top - new_top)));
  FloatVec sum = hn::Mul(hn::Load(d, row.sum), hn::Set(d, correction));
  for (std::int64_t j = 0; j < valid; j += kLanes) {
    const auto live = hn::FirstN(d, static_cast<std::size_t>(std::min(kLanes, valid - j)));
    const FloatVec below = hn::Sub(hn::LoadU(d, s + j), hn::Set(d, new_top));
    const FloatVec p = hn::IfThenElseZero(live, vexp(d, hn::IfThenElseZero(live, below)));
    hn::StoreU(p, d, s + j);
    sum = hn::Add(sum, p);
  }
  hn::Store(sum, d, row.sum);
  row.top = new_top;
  return correction;
}

/// to = [q_lat | q_s | zeros up to whole vectors] of one row and head.
HWY_INLINE void copy_query(const MlaQuery& q, std::int64_t t, std::int64_t h, float* to) {
  const std::int64_t latent = q.latent.size(2);
  const std::int64_t shared = q.shared.size(2);
  const float* const from = q.latent.row(t) + h * q.latent.stride(1);
  std::copy(from, from + latent, to);
  const float* const tail = q.shared.row(t) + h * q.shared.stride(1);
  std::copy(tail, tail + shared, to + latent);
  std::fill(to + latent + shared, to + round_up(latent + shared, kLanes), 0.0F);
}

}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
