// check.h — assertions about our own code. TDM_CHECK is always on and aborts; TDM_DCHECK only in
// debug builds.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

namespace tandem::detail {
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               const std::string& detail);

/// Numbers and text only: this header is read by device compilers too, which cannot read fmt.
template <typename T>
void describe_one(std::string& out, const T& value) {
  out += ' ';
  if constexpr (std::is_arithmetic_v<T>) {
    out += std::to_string(value);
  } else {
    out += std::string_view(value);
  }
}

template <typename... Args>
std::string describe(const Args&... args) {
  std::string out;
  (describe_one(out, args), ...);
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
