// view.h — TensorView<T, Rank>: pointer + shape + strides, passed by value. Row-major, the last
// index fastest. A view never outlives the call it is passed to unless a comment names the owner.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "core/check.h"

namespace tandem {

template <typename T, int Rank>
class TensorView {
 public:
  using Shape = std::array<std::int64_t, static_cast<std::size_t>(Rank)>;

  constexpr TensorView() = default;
  /// Contiguous.
  constexpr TensorView(T* data, Shape shape) : data_(data), shape_(shape) {
    std::int64_t stride = 1;
    for (int axis = Rank - 1; axis >= 0; --axis) {
      strides_[at(axis)] = stride;
      stride *= shape[at(axis)];
    }
  }
  constexpr TensorView(T* data, Shape shape, Shape strides)
      : data_(data), shape_(shape), strides_(strides) {}

  /// A view of mutable elements reads as a view of const ones.
  constexpr operator TensorView<const T, Rank>() const  // NOLINT(google-explicit-constructor)
      requires(!std::is_const_v<T>) {
    return {data_, shape_, strides_};
  }

  [[nodiscard]] constexpr T* data() const { return data_; }
  [[nodiscard]] constexpr std::int64_t size(int axis) const { return shape_[at(axis)]; }
  [[nodiscard]] constexpr std::int64_t stride(int axis) const { return strides_[at(axis)]; }
  [[nodiscard]] constexpr const Shape& shape() const { return shape_; }
  [[nodiscard]] constexpr bool empty() const { return numel() == 0; }
  [[nodiscard]] constexpr std::int64_t numel() const {
    std::int64_t n = 1;
    for (const std::int64_t extent : shape_) {
      n *= extent;
    }
    return n;
  }
  [[nodiscard]] constexpr bool contiguous() const {
    std::int64_t expected = 1;
    for (int axis = Rank - 1; axis >= 0; --axis) {
      if (shape_[at(axis)] != 1 && strides_[at(axis)] != expected) {
        return false;
      }
      expected *= shape_[at(axis)];
    }
    return true;
  }

  template <typename... Index>
  [[nodiscard]] constexpr T& operator()(Index... index) const {
    static_assert(sizeof...(Index) == Rank);
    const std::array<std::int64_t, static_cast<std::size_t>(Rank)> indices{
        static_cast<std::int64_t>(index)...};
    std::int64_t offset = 0;
    for (int axis = 0; axis < Rank; ++axis) {
      TDM_DCHECK(indices[at(axis)] >= 0 && indices[at(axis)] < shape_[at(axis)], indices[at(axis)],
                 shape_[at(axis)]);
      offset += indices[at(axis)] * strides_[at(axis)];
    }
    return data_[offset];
  }
  /// Pointer to the start of row `i` of axis 0.
  [[nodiscard]] constexpr T* row(std::int64_t i) const { return data_ + i * strides_[0]; }

  /// Rows [begin, begin + count) of axis 0.
  [[nodiscard]] constexpr TensorView rows(std::int64_t begin, std::int64_t count) const {
    TDM_DCHECK(begin >= 0 && count >= 0 && begin + count <= shape_[0], begin, count, shape_[0]);
    Shape shape = shape_;
    shape[0] = count;
    return {data_ + begin * strides_[0], shape, strides_};
  }
  /// Columns [begin, begin + count) of the last axis.
  [[nodiscard]] constexpr TensorView cols(std::int64_t begin, std::int64_t count) const {
    TDM_DCHECK(begin >= 0 && count >= 0 && begin + count <= shape_[at(Rank - 1)], begin, count,
               shape_[at(Rank - 1)]);
    Shape shape = shape_;
    shape[at(Rank - 1)] = count;
    return {data_ + begin * strides_[at(Rank - 1)], shape, strides_};
  }

 private:
  static constexpr std::size_t at(int axis) { return static_cast<std::size_t>(axis); }

  T* data_ = nullptr;
  Shape shape_{};
  Shape strides_{};
};

using F32Vec = TensorView<float, 1>;
using F32Mat = TensorView<float, 2>;
using F32Cube = TensorView<float, 3>;
using ConstF32Vec = TensorView<const float, 1>;
using ConstF32Mat = TensorView<const float, 2>;
using ConstF32Cube = TensorView<const float, 3>;
using ConstI32Vec = TensorView<const std::int32_t, 1>;
using ConstI32Mat = TensorView<const std::int32_t, 2>;
using I32Mat = TensorView<std::int32_t, 2>;

}  // namespace tandem
