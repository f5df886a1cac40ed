// formats-inl.h — how a weight format becomes fp32 in registers, compiled once per SIMD target.
// Every value is the one that ops/gemm.h defines, to the bit.

#if defined(TDM_GEMM_FORMATS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TDM_GEMM_FORMATS_INL_H
#undef TDM_GEMM_FORMATS_INL_H
#else
#define TDM_GEMM_FORMATS_INL_H
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include <hwy/highway.h>

#include "backends/cpu/gemm/panel.h"

#ifndef TDM_UNROLL
#ifdef __clang__
#define TDM_UNROLL _Pragma("unroll")
#else
#define TDM_UNROLL _Pragma("GCC unroll 64")
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace tandem::gemm::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, 16>;
using Words = hn::RebindToUnsigned<Floats>;
using Ints = hn::RebindToSigned<Floats>;
using Bytes = hn::Rebind<std::uint8_t, Floats>;
using VF = hn::Vec<Floats>;
using VU = hn::Vec<Words>;

inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(Floats()));
inline constexpr int kVectors = 16 / kLanes;  // vectors a panel

static_assert(HWY_NATIVE_FMA || HWY_TARGET == HWY_SCALAR, "this target rounds twice");

HWY_INLINE VF fma(VF a, VF b, VF c) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(Floats(), std::fma(hn::GetLane(a), hn::GetLane(b), hn::GetLane(c)));
#else
  return hn::MulAdd(a, b, c);
#endif
}

template <int kBits>
HWY_INLINE VU shift_right(VU v) {
  if constexpr (kBits == 0) {
    return v;
  } else {
    return hn::ShiftRight<kBits>(v);
  }
}
template <int kBits>
HWY_MAYBE_UNUSED HWY_INLINE VU shift_left(VU v) {
  if constexpr (kBits == 0) {
    return v;
  } else {
    return hn::ShiftLeft<kBits>(v);
  }
}

// The values of E2M1, by code; the second half is negative.
alignas(64) inline constexpr float kE2M1[16] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                                4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                                -2.0F, -3.0F, -4.0F, -6.0F};

/// The 32 bits that start `bytes` after each lane of the word at `at`; storage is padded for it.
HWY_INLINE VU load_shifted(const std::uint32_t* at, int bytes) {
  const std::uint8_t* from = reinterpret_cast<const std::uint8_t*>(at) + bytes;
#if HWY_TARGET == HWY_SCALAR
  std::uint32_t lane = 0;
  std::memcpy(&lane, from, sizeof(lane));
  return hn::Set(Words(), lane);
#else
  return hn::BitCast(Words(), hn::LoadU(hn::Repartition<std::uint8_t, Words>(), from));
#endif
}

/// The E2M1 value of nibble kIndex of every lane.
template <int kIndex>
HWY_INLINE VF e2m1(const std::uint32_t* at) {
  const Floats d;
#if HWY_TARGET == HWY_AVX3
  // Shifts share their port with the multiplications, so whole bytes are skipped by the load.
  // vpermps looks at the low 4 bits of a lane only; Highway's debug check does not know.
  VU codes = shift_right<4 * (kIndex % 2)>(load_shifted(at, kIndex / 2));
  if constexpr (HWY_IS_DEBUG_BUILD) {
    codes = hn::And(codes, hn::Set(Words(), 15U));
  }
  return hn::TableLookupLanes(hn::Load(d, kE2M1), hn::IndicesFromVec(d, codes));
#elif HWY_TARGET == HWY_AVX2
  const VU words = hn::LoadU(Words(), at);
  VU codes = shift_right<4 * kIndex>(words);
  if constexpr (HWY_IS_DEBUG_BUILD) {
    codes = hn::And(codes, hn::Set(Words(), 7U));
  }
  const VF magnitude = hn::TableLookupLanes(hn::Load(d, kE2M1), hn::IndicesFromVec(d, codes));
  const VU sign = hn::And(shift_left<28 - 4 * kIndex>(words), hn::Set(Words(), 0x80000000U));
  return hn::Xor(magnitude, hn::BitCast(d, sign));
#else
  const VU codes = hn::And(shift_right<4 * kIndex>(hn::LoadU(Words(), at)), hn::Set(Words(), 15U));
  return hn::GatherIndex(d, kE2M1, hn::BitCast(Ints(), codes));
#endif
}

HWY_INLINE VU load_bytes(const std::uint8_t* from) {
  return hn::PromoteTo(Words(), hn::LoadU(Bytes(), from));
}

/// 2^(code - 127); 255 is NaN.
HWY_INLINE VF e8m0(VU codes) {
  const VU bits = hn::ShiftLeft<23>(codes);
  // 2^-127 is subnormal: fraction 1/2 at exponent 0. The same bit makes a NaN of infinity.
  const auto ends = hn::Or(hn::Eq(codes, hn::Zero(Words())), hn::Eq(codes, hn::Set(Words(), 255U)));
  return hn::BitCast(Floats(),
                     hn::Or(bits, hn::IfThenElseZero(ends, hn::Set(Words(), 0x00400000U))));
}

HWY_INLINE VF e4m3(VU codes) {
  const Floats d;
  const Words w;
  const VU magnitude = hn::And(codes, hn::Set(w, 0x7FU));
  const VF normal = hn::BitCast(d, hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(w, 120U << 23U)));
  const VF subnormal =
      hn::Mul(hn::ConvertTo(d, hn::BitCast(Ints(), magnitude)), hn::Set(d, 0x1.0p-9F));
  const VF nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  const auto as_mask = [&](auto mask) { return hn::RebindMask(d, mask); };
  VF value = hn::IfThenElse(as_mask(hn::Lt(hn::BitCast(Ints(), magnitude), hn::Set(Ints(), 8))),
                            subnormal, normal);
  value = hn::IfThenElse(as_mask(hn::Eq(magnitude, hn::Set(w, 0x7FU))), nan, value);
  const VU sign = hn::ShiftLeft<24>(hn::And(codes, hn::Set(w, 0x80U)));
  return hn::Or(value, hn::BitCast(d, sign));
}

/// 1 / v for a power of two whose reciprocal is normal.
HWY_INLINE VF power_of_two_inverse(VF v) {
  return hn::BitCast(Floats(), hn::Sub(hn::Set(Words(), 254U << 23U), hn::BitCast(Words(), v)));
}

// A format: how many k one 32-bit lane holds, the scale of a block, and the value of the j-th k of
// the word at `at`. kScaledSums: the value is still to be multiplied by the scale, see Tile::run.
struct F32Format {
  static constexpr WeightFormat kFormat = WeightFormat::kF32;
  static constexpr int kGroup = 1;
  static constexpr bool kScaledSums = false;
  static HWY_INLINE VF scale(const std::uint8_t*, float) { return hn::Zero(Floats()); }
  template <int kIndex>
  static HWY_INLINE VF take(const std::uint32_t* at, VF) {
    return hn::BitCast(Floats(), hn::LoadU(Words(), at));
  }
};

struct BF16Format {
  static constexpr WeightFormat kFormat = WeightFormat::kBF16;
  static constexpr int kGroup = 2;
  static constexpr bool kScaledSums = false;
  static HWY_INLINE VF scale(const std::uint8_t*, float) { return hn::Zero(Floats()); }
  template <int kIndex>
  static HWY_INLINE VF take(const std::uint32_t* at, VF) {
    const VU words = hn::LoadU(Words(), at);
    if constexpr (kIndex == 0) {
      return hn::BitCast(Floats(), hn::ShiftLeft<16>(words));
    } else {
      return hn::BitCast(Floats(), hn::And(words, hn::Set(Words(), 0xFFFF0000U)));
    }
  }
};

struct MxFp4Format {
  static constexpr WeightFormat kFormat = WeightFormat::kMxFp4;
  static constexpr int kGroup = 8;
  static constexpr bool kScaledSums = false;
  static HWY_INLINE VF scale(const std::uint8_t* from, float) { return e8m0(load_bytes(from)); }
  template <int kIndex>
  static HWY_INLINE VF take(const std::uint32_t* at, VF scale) {
    return hn::Mul(e2m1<kIndex>(at), scale);
  }
};

/// MXFP4 for weights and rows whose sums can be scaled without a change of rounding (panel.h).
struct MxFp4TameFormat {
  static constexpr WeightFormat kFormat = WeightFormat::kMxFp4;
  static constexpr int kGroup = 8;
  static constexpr bool kScaledSums = true;
  static HWY_INLINE VF scale(const std::uint8_t* from, float) {
    return hn::BitCast(Floats(), hn::ShiftLeft<23>(load_bytes(from)));
  }
  template <int kIndex>
  static HWY_INLINE VF take(const std::uint32_t* at, VF) {
    return e2m1<kIndex>(at);
  }
};

struct NvFp4Format {
  static constexpr WeightFormat kFormat = WeightFormat::kNvFp4;
  static constexpr int kGroup = 8;
  static constexpr bool kScaledSums = false;
  static HWY_INLINE VF scale(const std::uint8_t* from, float scale_2) {
    return hn::Mul(e4m3(load_bytes(from)), hn::Set(Floats(), scale_2));
  }
  template <int kIndex>
  static HWY_INLINE VF take(const std::uint32_t* at, VF scale) {
    return hn::Mul(e2m1<kIndex>(at), scale);
  }
};

struct Fp8BlockFormat {
  static constexpr WeightFormat kFormat = WeightFormat::kFp8Block;
  static constexpr int kGroup = 4;
  static constexpr bool kScaledSums = false;
  /// The block's scale times 2^120 (pack.cpp).
  static HWY_INLINE VF scale(const std::uint8_t* from, float) {
    return hn::LoadU(Floats(), reinterpret_cast<const float*>(from));
  }
  template <int kIndex>
  static HWY_INLINE VF take(const std::uint32_t* at, VF scale) {
    // Code kIndex lies 3 bytes on (kFp8Offset), so a load at kIndex brings it to the top of its
    // lane: s eeee mmm. 4 bits down, exponent and fraction are in place with a bias of 7 instead of
    // 127: the value is 2^-120 too small, and subnormals come out right as well.
    const VU top = load_shifted(at, kIndex);
    const VU down = hn::BitCast(Words(), hn::ShiftRight<4>(hn::BitCast(Ints(), top)));
    const VU bits = hn::And(down, hn::Set(Words(), 0x87F00000U));
    return hn::Mul(hn::BitCast(Floats(), bits), scale);
  }
};

}  // namespace tandem::gemm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
