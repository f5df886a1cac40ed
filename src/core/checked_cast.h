// checked_cast.h — the only way to narrow an integer.
#pragma once

#include <concepts>
#include <utility>

#include "core/check.h"

namespace tandem {

template <std::integral To, std::integral From>
[[nodiscard]] constexpr To checked_cast(From value) {
  TDM_CHECK(std::in_range<To>(value), value);
  return static_cast<To>(value);
}

/// size_t of a non-negative int64_t: containers index with one, shapes are counted with the other.
[[nodiscard]] constexpr std::size_t usize(std::int64_t value) {
  TDM_DCHECK(value >= 0, value);
  return static_cast<std::size_t>(value);
}

/// int64_t of a container's size.
template <typename Container>
[[nodiscard]] constexpr std::int64_t isize(const Container& container) {
  return static_cast<std::int64_t>(container.size());
}

}  // namespace tandem
