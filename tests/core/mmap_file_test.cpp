// Mapped files, and what a process says when a page of one is gone.
#include "core/mmap_file.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "support/temp_path.h"

namespace tandem {
namespace {

std::string write_file(const std::string& name, std::size_t bytes) {
  const std::string path = temp_path(name);
  std::ofstream(path, std::ios::binary) << std::string(bytes, 'x');
  return path;
}

TEST(MmapFile, HoldsTheWholeFile) {
  const std::string path = write_file("mapped", 10'000);
  const auto file = MmapFile::open(path);
  ASSERT_TRUE(file.ok()) << file.message();
  EXPECT_EQ(file->bytes().size(), 10'000U);
  EXPECT_EQ(file->bytes()[9'999], std::byte{'x'});
}

TEST(MmapFileDeathTest, AFileThatShrinksUnderItsReaderIsNamed) {
  const std::string path = write_file("shrinking", 5 * 4096);
  const std::string other = write_file("other", 5 * 4096);
  const auto read_after = [&](bool truncate) {
    explain_unreadable_pages(3);
    auto first = MmapFile::open(other).value_or_throw();
    auto file = MmapFile::open(path).value_or_throw();
    const MmapFile moved = std::move(file);
    if (truncate) {
      std::filesystem::resize_file(path, 4096);
    }
    volatile std::byte sum{};
    for (const std::byte byte : moved.bytes()) {
      sum = sum ^ byte;
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(read_after(false), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(read_after(true), ::testing::ExitedWithCode(3),
              "tandem: .*shrinking.*: a part of the file cannot be read any more");
}

}  // namespace
}  // namespace tandem
