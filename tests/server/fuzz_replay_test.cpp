// The fuzzer's seeds and past crashes.
#include <filesystem>
#include <fstream>
#include <iterator>

#include <gtest/gtest.h>

#include "fuzz/server_target.h"

namespace tandem::fuzz {
namespace {

TEST(FuzzReplay, ServerSeedsAndRegressions) {
  ServerUnderFuzz server;
  int num_inputs = 0;
  for (const char* folder : {"corpus", "regressions"}) {
    const std::filesystem::path dir =
        std::filesystem::path(TDM_SOURCE_DIR) / "tests/fuzz" / folder / "server";
    if (!std::filesystem::exists(dir)) {
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(dir)) {
      std::ifstream in(entry.path(), std::ios::binary);
      const std::string input{std::istreambuf_iterator<char>(in), {}};
      server.run(input);
      ++num_inputs;
    }
  }
  EXPECT_GE(num_inputs, 5);
}

}  // namespace
}  // namespace tandem::fuzz
