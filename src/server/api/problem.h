// problem.h — the first thing that is wrong with a request. Readers go on after it, with defaults,
// so that they need not be checked one by one; the endpoint looks here before it acts.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "server/http/message.h"

namespace tandem::server {

class Problem {
 public:
  explicit operator bool() const { return error_.has_value(); }
  [[nodiscard]] const ApiError& error() const { return *error_; }

  void set(ApiError error) {
    if (!error_) {
      error_ = std::move(error);
    }
  }
  /// A 400 about the field at `param`.
  void reject(std::string param, std::string message) {
    set({400, "invalid_request_error", std::move(message), std::move(param)});
  }

 private:
  std::optional<ApiError> error_;
};

}  // namespace tandem::server
