// check.h — assertions about our own code. TDM_CHECK is always on and aborts; TDM_DCHECK only in
// debug builds.
#pragma once

#include <string>

#include <fmt/format.h>

namespace tandem::detail {
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               const std::string& detail);

template <typename... Args>
std::string describe(Args&&... args) {
  std::string out;
  ((out += fmt::format(" {}", args)), ...);
  return out;
}
}  // namespace tandem::detail

/// TDM_CHECK(cond, values...): aborts with the condition and the values when `cond` is false.
#define TDM_CHECK(cond, ...)                                                   \
  do {                                                                         \
    if (!(cond)) [[unlikely]] {                                                \
      ::tandem::detail::check_failed(__FILE__, __LINE__, #cond,                \
                                     ::tandem::detail::describe(__VA_ARGS__)); \
    }                                                                          \
  } while (false)

#ifdef NDEBUG
#define TDM_DCHECK(cond, ...) \
  do {                        \
  } while (false)
#else
#define TDM_DCHECK(cond, ...) TDM_CHECK(cond __VA_OPT__(, ) __VA_ARGS__)
#endif
