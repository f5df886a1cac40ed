#include "core/check.h"

#include <cstdio>
#include <cstdlib>

namespace tandem::detail {

void check_failed(const char* file, int line, const char* condition, const std::string& detail) {
  std::fprintf(stderr, "%s:%d: internal check failed: %s%s%s\n", file, line, condition,
               detail.empty() ? "" : " |", detail.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace tandem::detail
