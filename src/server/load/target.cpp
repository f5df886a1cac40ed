#include "server/load/target.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

namespace tandem::load {
namespace {

bool is_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  return error == std::errc() && end == text.data() + text.size() && port > 0;
}

/// Visible ASCII that can stand in a request line or a header as it is.
bool is_plain(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c > ' ' && c < '\x7f'; });
}

}  // namespace

std::string Target::authority() const {
  const std::string shown = host.find(':') == std::string::npos ? host : "[" + host + "]";
  return shown + ":" + port;
}

std::string Target::url() const {
  return "http://" + authority() + base_path;
}

Expected<Target> parse_target(std::string_view url) {
  constexpr std::string_view kScheme = "http://";
  const auto refuse = [&](std::string_view expected) {
    return fail("--url '{}': expected {}", url, expected);
  };
  if (url.starts_with("https://")) {
    return refuse("http://; put a proxy before a server that speaks TLS only");
  }
  if (!url.starts_with(kScheme) || !is_plain(url) || url.find_first_of("?#@") != url.npos) {
    return refuse("http://HOST[:PORT][/PREFIX]");
  }
  std::string_view rest = url.substr(kScheme.size());
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  std::string_view path = rest.substr(slash);
  rest = rest.substr(0, slash);
  Target target{"", "80", ""};
  if (rest.starts_with('[')) {
    const std::size_t close = rest.find(']');
    if (close == rest.npos) {
      return refuse("a ']' after the IPv6 address");
    }
    target.host = rest.substr(1, close - 1);
    rest = rest.substr(close + 1);
  } else {
    target.host = rest.substr(0, std::min(rest.find(':'), rest.size()));
    rest = rest.substr(target.host.size());
  }
  if (target.host.empty()) {
    return refuse("a host after http://");
  }
  if (!rest.empty()) {
    if (rest.front() != ':' || !is_port(rest.substr(1))) {
      return refuse("a port from 1 to 65535 after the host");
    }
    target.port = rest.substr(1);
  }
  while (path.ends_with('/')) {
    path.remove_suffix(1);
  }
  if (path.ends_with("/v1")) {
    path.remove_suffix(3);
  }
  target.base_path = path;
  return target;
}

}  // namespace tandem::load
