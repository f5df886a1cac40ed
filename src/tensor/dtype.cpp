#include "tensor/dtype.h"

#include <array>

#include "core/check.h"

namespace tandem {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  std::int64_t size;
};

constexpr std::array<DTypeInfo, 14> kDTypes{{{DType::kF32, "F32", 4},
                                             {DType::kBF16, "BF16", 2},
                                             {DType::kF16, "F16", 2},
                                             {DType::kF8E4M3, "F8_E4M3", 1},
                                             {DType::kU8, "U8", 1},
                                             {DType::kI8, "I8", 1},
                                             {DType::kI16, "I16", 2},
                                             {DType::kU16, "U16", 2},
                                             {DType::kI32, "I32", 4},
                                             {DType::kU32, "U32", 4},
                                             {DType::kI64, "I64", 8},
                                             {DType::kU64, "U64", 8},
                                             {DType::kF64, "F64", 8},
                                             {DType::kBool, "BOOL", 1}}};

const DTypeInfo& info(DType dtype) {
  for (const DTypeInfo& entry : kDTypes) {
    if (entry.dtype == dtype) {
      return entry;
    }
  }
  TDM_CHECK(false, "unknown dtype");
  return kDTypes[0];
}

}  // namespace

std::int64_t dtype_size(DType dtype) {
  return info(dtype).size;
}
std::string_view dtype_name(DType dtype) {
  return info(dtype).name;
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DTypeInfo& entry : kDTypes) {
    if (entry.name == name) {
      return entry.dtype;
    }
  }
  return std::nullopt;
}

}  // namespace tandem
