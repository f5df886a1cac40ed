#include "cli/backend.h"

#include <charconv>

namespace tandem::cli {

int gpu_of(const std::string& name) {
  constexpr std::string_view kPrefix = "cuda:";
  int ordinal = 0;
  if (name.starts_with(kPrefix)) {
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), ordinal);
  }
  return name == "cpu" ? -1 : ordinal;
}

std::string check_device_name(const std::string& name) {
  if (name == "cpu" || name == "cuda") {
    return {};
  }
  const bool numbered = name.starts_with("cuda:") && name.size() > 5 && name.size() < 9 &&
                        name.find_first_not_of("0123456789", 5) == std::string::npos;
  return numbered ? std::string{} : "'" + name + "': expected cpu, cuda or cuda:N";
}

}  // namespace tandem::cli
