#include "models/kimi_k3/stored_values.h"

#include <algorithm>
#include <cstring>

#include "core/checked_cast.h"
#include "tensor/quant.h"

namespace tandem::kimi_k3 {
namespace {

ConstU8Mat u8_mat(const void* data, std::int64_t rows, std::int64_t cols) {
  return {static_cast<const std::uint8_t*>(data), {rows, cols}};
}

MxFp4View mx_view(const WeightRef& w) {
  return {u8_mat(w.data, w.rows, w.cols / 2), u8_mat(w.scales, w.rows, w.cols / kMxFp4Group)};
}
NvFp4View nv_view(const WeightRef& w) {
  return {u8_mat(w.data, w.rows, w.cols / 2), u8_mat(w.scales, w.rows, w.cols / kNvFp4Group),
          w.scale_2};
}
Fp8BlockView fp8_view(const WeightRef& w) {
  return {u8_mat(w.data, w.rows, w.cols),
          {static_cast<const float*>(w.scales),
           {(w.rows + kFp8Block - 1) / kFp8Block, (w.cols + kFp8Block - 1) / kFp8Block}}};
}

/// An element whose exponent is all ones is no number. In blocks, so that the compiler can look at
/// many at a time.
template <typename Bits>
Status check(std::span<const std::byte> bytes, Bits exponent, std::int64_t cols) {
  constexpr std::size_t kBlock = 4096;
  Bits block[kBlock];
  const std::size_t count = bytes.size() / sizeof(Bits);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    std::memcpy(block, bytes.data() + begin * sizeof(Bits), n * sizeof(Bits));
    unsigned bad = 0;
    for (std::size_t i = 0; i < n; ++i) {
      bad |= static_cast<unsigned>((block[i] & exponent) == exponent);
    }
    if (bad != 0) {
      const Bits* const found =
          std::find_if(block, block + n, [&](Bits b) { return (b & exponent) == exponent; });
      const auto at = static_cast<std::int64_t>(begin) + (found - block);
      return fail("weight[{}, {}]: expected a finite number, found NaN or infinity", at / cols,
                  at % cols);
    }
  }
  return Ok{};
}

}  // namespace

void to_float(const TensorInfo& tensor, std::span<float> out) {
  if (tensor.dtype == DType::kF32) {
    std::memcpy(out.data(), tensor.bytes.data(), out.size_bytes());
    return;
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    BF16 value;
    std::memcpy(&value.bits, tensor.bytes.data() + 2 * i, 2);
    out[i] = value.to_float();
  }
}

Status validate_scales(const WeightRef& w) {
  switch (w.format) {
    case WeightFormat::kMxFp4:
      return validate(mx_view(w));
    case WeightFormat::kNvFp4:
      return validate(nv_view(w));
    case WeightFormat::kFp8Block:
      return validate(fp8_view(w));
    case WeightFormat::kF32:
    case WeightFormat::kBF16:
      return Ok{};
  }
  return Ok{};
}

Expected<std::vector<float>> dequantise_any(const WeightRef& w) {
  switch (w.format) {
    case WeightFormat::kMxFp4:
      return dequantise(mx_view(w));
    case WeightFormat::kNvFp4:
      return dequantise(nv_view(w));
    case WeightFormat::kFp8Block:
      return dequantise(fp8_view(w));
    case WeightFormat::kF32:
    case WeightFormat::kBF16:
      break;
  }
  std::vector<float> out(usize(w.rows * w.cols));
  const TensorInfo tensor{
      {"", w.format == WeightFormat::kF32 ? DType::kF32 : DType::kBF16, {w.rows, w.cols}},
      {static_cast<const std::byte*>(w.data),
       out.size() * (w.format == WeightFormat::kF32 ? 4U : 2U)}};
  to_float(tensor, out);
  return out;
}

Status check_finite(std::span<const std::byte> bytes, DType dtype, std::int64_t cols) {
  switch (dtype) {
    case DType::kF32:
      return check<std::uint32_t>(bytes, 0x7F80'0000U, cols);
    case DType::kBF16:
      return check<std::uint16_t>(bytes, 0x7F80U, cols);
    default:
      return Ok{};
  }
}

}  // namespace tandem::kimi_k3
