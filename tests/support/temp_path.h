// temp_path.h — a path for a test's files that no other test, process or checkout uses at the same
// time.
#pragma once

#include <filesystem>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace tandem {

/// <temp>/tandem_<pid>_<suite>_<test>_<name>; whatever was there is removed.
inline std::string temp_path(const std::string& name) {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  std::string path = fmt::format("{}/tandem_{}_{}_{}_{}", testing::TempDir(), getpid(),
                                 info->test_suite_name(), info->name(), name);
  std::filesystem::remove_all(path);
  return path;
}

}  // namespace tandem
