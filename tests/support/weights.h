// weights.h — random weights in every storage format, for op tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <ostream>
#include <vector>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "ops/gemm.h"
#include "tensor/dtype.h"

namespace tandem::test {

struct Format {
  WeightFormat format;
  const char* name;
  std::int64_t multiple;  // of the reduction length

  [[nodiscard]] std::int64_t round_up(std::int64_t in) const {
    return (in + multiple - 1) / multiple * multiple;
  }
  friend std::ostream& operator<<(std::ostream& out, const Format& f) { return out << f.name; }
};

inline constexpr Format kFormats[] = {
    {WeightFormat::kF32, "F32", 1},           {WeightFormat::kBF16, "BF16", 1},
    {WeightFormat::kMxFp4, "MxFp4", 32},      {WeightFormat::kNvFp4, "NvFp4", 16},
    {WeightFormat::kFp8Block, "Fp8Block", 1},
};

/// Owns a weight [out, in] with random codes and scales as a checkpoint would store them.
class RandomWeight {
 public:
  RandomWeight(WeightFormat format, std::int64_t out, std::int64_t in, std::uint64_t seed)
      : format_(format), out_(out), in_(in) {
    Rng rng(mix_key({seed, 0x3E16}));
    switch (format) {
      case WeightFormat::kF32:
        fill<float>(out * in, [&] { return static_cast<float>(rng.normal()); });
        break;
      case WeightFormat::kBF16:
        fill<BF16>(out * in, [&] { return BF16::from_float(static_cast<float>(rng.normal())); });
        break;
      case WeightFormat::kMxFp4:
        fill<std::uint8_t>(out * in / 2, [&] { return byte(rng, 0, 255); });
        scale_bytes_.resize(usize(out * in / 32));
        for (std::uint8_t& code : scale_bytes_) {
          code = byte(rng, 117, 129);
        }
        break;
      case WeightFormat::kNvFp4:
        fill<std::uint8_t>(out * in / 2, [&] { return byte(rng, 0, 255); });
        scale_bytes_.resize(usize(out * in / 16));
        for (std::uint8_t& code : scale_bytes_) {
          code = byte(rng, 0, 0x7E);
        }
        scale_2_ = 0.0037F;
        break;
      case WeightFormat::kFp8Block:
        // All codes but NaN, subnormals included.
        fill<std::uint8_t>(out * in, [&] {
          return static_cast<std::uint8_t>(byte(rng, 0, 0x7E) | (rng.below(2) << 7U));
        });
        scale_floats_.resize(usize((out + 127) / 128 * ((in + 127) / 128)));
        for (float& scale : scale_floats_) {
          scale = static_cast<float>(rng.uniform() * 0.01);
        }
        break;
    }
  }

  [[nodiscard]] WeightRef ref() const {
    const void* scales = format_ == WeightFormat::kFp8Block
                             ? static_cast<const void*>(scale_floats_.data())
                             : static_cast<const void*>(scale_bytes_.data());
    return {format_, out_, in_, in_, data_.data(), scales, scale_2_};
  }
  /// The codes, to plant special values.
  [[nodiscard]] std::vector<std::uint8_t>& codes() { return data_; }
  [[nodiscard]] std::vector<std::uint8_t>& scale_codes() { return scale_bytes_; }
  [[nodiscard]] std::vector<float>& scale_values() { return scale_floats_; }

 private:
  static std::uint8_t byte(Rng& rng, std::uint64_t low, std::uint64_t high) {
    return static_cast<std::uint8_t>(low + rng.below(high - low + 1));
  }
  template <typename T, typename Fn>
  void fill(std::int64_t count, const Fn& next) {
    std::vector<T> values(usize(count));
    for (T& value : values) {
      value = next();
    }
    data_.resize(usize(count) * sizeof(T));
    if (count > 0) {
      std::memcpy(data_.data(), values.data(), data_.size());
    }
  }

  WeightFormat format_;
  std::int64_t out_;
  std::int64_t in_;
  std::vector<std::uint8_t> data_;
  std::vector<std::uint8_t> scale_bytes_;
  std::vector<float> scale_floats_;
  float scale_2_ = 1.0F;
};

[[nodiscard]] inline PackedWeight packed(const ExecCtx& ctx, const WeightRef& weight,
                                         Orientation orientation = Orientation::kNormal) {
  PackedWeight result;
  ops::pack(ctx, result, weight, orientation);
  return result;
}

}  // namespace tandem::test
