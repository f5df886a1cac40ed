#include "models/kimi_k3/dummy.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "models/kimi_k3/stored_parts.h"
#include "tensor/dtype.h"

namespace tandem::kimi_k3 {
namespace {

enum class Kind { kOnes, kSmallF32, kSmallBF16, kCodes, kFp8Codes, kNvScales, kMxScales, kScale };
constexpr std::size_t kNumKinds = 8;

Kind kind_of(const TensorEntry& entry, const TensorSpec& part) {
  const bool is_scale = part.name.ends_with("weight_scale");
  switch (part.dtype) {
    case DType::kBF16:
      return Kind::kSmallBF16;
    case DType::kU8:
      return is_scale ? Kind::kMxScales : Kind::kCodes;
    case DType::kF8E4M3:
      return is_scale ? Kind::kNvScales : Kind::kFp8Codes;
    default:
      if (part.name.ends_with("scale") || part.name.ends_with("scale_2")) {
        return Kind::kScale;
      }
      return entry.role == TensorRole::kNorm ? Kind::kOnes : Kind::kSmallF32;
  }
}

/// One element of a kind; matrices have entries of some 0.01, so that nothing overflows at any
/// width.
void put_value(Kind kind, Rng& rng, std::vector<std::byte>& out) {
  const auto put = [&](const auto& value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    out.insert(out.end(), bytes.begin(), bytes.end());
  };
  const auto small = [&] { return static_cast<float>(0.04 * (rng.uniform() - 0.5)); };
  const auto byte = [&](std::uint64_t low, std::uint64_t high) {
    return static_cast<std::uint8_t>(low + rng.below(high - low + 1));
  };
  switch (kind) {
    case Kind::kOnes:
      return put(1.0F);
    case Kind::kSmallF32:
      return put(small());
    case Kind::kSmallBF16:
      return put(BF16::from_float(small()));
    case Kind::kCodes:
      return put(byte(0, 255));
    case Kind::kFp8Codes:
      return put(static_cast<std::uint8_t>(byte(0x20, 0x40) | (rng.below(2) << 7U)));
    case Kind::kNvScales:  // 0.5 to 2
      return put(byte(0x30, 0x40));
    case Kind::kMxScales:  // 2^-10 to 2^-8
      return put(byte(117, 119));
    case Kind::kScale:
      return put(0.004F);
  }
}

std::vector<std::byte> make_pool(Kind kind, std::size_t bytes) {
  constexpr std::size_t kPeriod = std::size_t{8} << 20;  // of distinct values
  std::vector<std::byte> pool;
  pool.reserve(bytes);
  Rng rng(mix_key({0xD0, static_cast<std::uint64_t>(kind)}));
  while (pool.size() < std::min(bytes, kPeriod)) {
    put_value(kind, rng, pool);
  }
  pool.resize(bytes);
  for (std::size_t done = std::min(bytes, kPeriod); done < bytes;) {
    const std::size_t count = std::min(done, bytes - done);
    std::memcpy(pool.data() + done, pool.data(), count);
    done += count;
  }
  return pool;
}

}  // namespace

DummyTensors::DummyTensors(const Config& config, const InitOptions& options) : pools_(kNumKinds) {
  std::array<std::int64_t, kNumKinds> largest{};
  std::vector<std::size_t> kinds;
  for (const TensorEntry& entry : tensor_table(config, config.linear_attn_config.num_heads)) {
    for (TensorSpec& part : stored_parts(entry, options)) {
      const auto kind = static_cast<std::size_t>(kind_of(entry, part));
      largest[kind] = std::max(largest[kind], part.size_bytes());
      kinds.push_back(kind);
      tensors_.push_back({std::move(part), {}});
    }
  }
  for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
    pools_[kind] = make_pool(static_cast<Kind>(kind), usize(largest[kind]));
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].bytes = std::span(pools_[kinds[i]]).first(usize(tensors_[i].size_bytes()));
  }
}

Checkpoint DummyTensors::checkpoint(std::string label) const {
  return Checkpoint::of(std::move(label), tensors_);
}

}  // namespace tandem::kimi_k3
