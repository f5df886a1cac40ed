// Seeds and past crashes of the fuzzers, replayed without libFuzzer.
#include <filesystem>

#include <gtest/gtest.h>

#include "fuzz/targets.h"
#include "io/io_support.h"

namespace tandem {
namespace {

class FuzzReplay : public ::testing::TestWithParam<fuzz::Target> {};

TEST_P(FuzzReplay, SeedsAndPastCrashes) {
  int replayed = 0;
  for (const char* kind : {"corpus", "regressions"}) {
    const auto folder =
        std::filesystem::path(TDM_SOURCE_DIR) / "tests/fuzz" / kind / GetParam().name;
    if (!std::filesystem::is_directory(folder)) {
      continue;  // no crash so far
    }
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      SCOPED_TRACE(entry.path().string());
      GetParam().run(test::read_text(entry.path().string()));
      ++replayed;
    }
  }
  EXPECT_GT(replayed, 0);
}

INSTANTIATE_TEST_SUITE_P(Io, FuzzReplay, ::testing::ValuesIn(fuzz::kIoTargets),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace tandem
