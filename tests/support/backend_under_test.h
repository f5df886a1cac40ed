// backend_under_test.h — the backend a test executable was linked with. One of the two sources
// beside this header defines these; the tests themselves do not know which.
#pragma once

#include "core/arena.h"
#include "core/device.h"
#include "ops/op_table.h"

namespace tandem::test {

[[nodiscard]] const OpTable& ops_under_test();
/// Its memory is host-visible.
[[nodiscard]] Device& device_under_test();
[[nodiscard]] inline Arena arena_under_test() {
  return Arena(std::size_t{4} << 20, device_under_test());
}

}  // namespace tandem::test
