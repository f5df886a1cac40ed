#include "backends/cpu/cpu_backend.h"
#include "support/backend_under_test.h"

namespace tandem::test {

const OpTable& ops_under_test() {
  return cpu_backend();
}

Device& device_under_test() {
  return host_device();
}

}  // namespace tandem::test
