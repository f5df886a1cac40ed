// HTTP requests and their JSON bodies, sent to a whole server.
#include <cstddef>
#include <cstdint>

#include "fuzz/server_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static tandem::fuzz::ServerUnderFuzz server;
  server.run({reinterpret_cast<const char*>(data), size});
  return 0;
}
