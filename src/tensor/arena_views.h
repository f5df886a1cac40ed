// arena_views.h — uninitialised views into an arena.
#pragma once

#include "core/arena.h"
#include "tensor/view.h"

namespace tandem {

[[nodiscard]] inline F32Mat take_mat(Arena& arena, std::int64_t rows, std::int64_t cols) {
  return {arena.take<float>(rows * cols).data(), {rows, cols}};
}
[[nodiscard]] inline I32Mat take_i32_mat(Arena& arena, std::int64_t rows, std::int64_t cols) {
  return {arena.take<std::int32_t>(rows * cols).data(), {rows, cols}};
}
[[nodiscard]] inline F32Cube take_cube(Arena& arena, std::int64_t a, std::int64_t b,
                                       std::int64_t c) {
  return {arena.take<float>(a * b * c).data(), {a, b, c}};
}

}  // namespace tandem
