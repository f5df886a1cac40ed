// error.h — how failures travel. Bad input comes back as Expected<T>; a broken environment is
// thrown as Error; a bug of ours aborts through TDM_CHECK (check.h). Only cli/, worker loops and
// request boundaries catch Error.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include <fmt/format.h>

namespace tandem {

/// What is wrong with input from outside: one sentence that names the file, field or request and
/// what was expected.
struct Failure {
  enum class Kind {
    kInvalid,     // the input is wrong: the same again fails again
    kOverloaded,  // nothing is wrong with it, but there is no room now
  };
  std::string message;
  Kind kind = Kind::kInvalid;
};

/// `return fail("{}: expected {}", path, what);` converts to any Expected<T>.
template <typename... Args>
[[nodiscard]] Failure fail(fmt::format_string<Args...> format, Args&&... args) {
  return Failure{fmt::format(format, std::forward<Args>(args)...), Failure::Kind::kInvalid};
}

/// The environment broke (disk full, out of memory at start, a file vanished). Carries a message
/// for people.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Args>
[[noreturn]] void throw_error(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

/// A value or the Failure that says why there is none.
template <typename T>
class [[nodiscard]] Expected {
 public:
  Expected(T value)  // NOLINT(google-explicit-constructor): `return value;` is the point
      : state_(std::in_place_index<0>, std::move(value)) {}
  Expected(Failure failure) : state_(std::in_place_index<1>, std::move(failure)) {}  // NOLINT

  [[nodiscard]] bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  T& operator*() & { return std::get<0>(state_); }
  const T& operator*() const& { return std::get<0>(state_); }
  T&& operator*() && { return std::get<0>(std::move(state_)); }
  T* operator->() { return &std::get<0>(state_); }
  const T* operator->() const { return &std::get<0>(state_); }

  [[nodiscard]] const Failure& failure() const { return std::get<1>(state_); }
  [[nodiscard]] const std::string& message() const { return failure().message; }

  /// The value, or the failure raised as Error: for callers that cannot go on without it.
  T value_or_throw() && {
    if (!ok()) {
      throw Error(message());
    }
    return std::get<0>(std::move(state_));
  }

 private:
  std::variant<T, Failure> state_;
};

/// Success without a value.
struct Ok {};
using Status = Expected<Ok>;

}  // namespace tandem
