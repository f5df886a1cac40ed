// target.h — where a load goes: an http:// address.
#pragma once

#include <string>
#include <string_view>

#include "core/error.h"

namespace tandem::load {

struct Target {
  std::string host;       // a name or an address, IPv6 without brackets
  std::string port;       // "80" when the URL has none
  std::string base_path;  // what stands before "/v1/...": empty, or "/prefix"

  /// "http://host:port/prefix", for messages.
  [[nodiscard]] std::string url() const;
  /// The value of the header Host.
  [[nodiscard]] std::string authority() const;
};

/// "http://host[:port][/prefix]"; a last "/v1" or "/" is dropped, so that the base URL of OpenAI's
/// clients fits. Errors: a Failure that shows the URL and what was expected.
[[nodiscard]] Expected<Target> parse_target(std::string_view url);

}  // namespace tandem::load
