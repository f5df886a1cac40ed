#include "io/atomic_file.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "io/checkpoint.h"
#include "io/io_support.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Caps the size of files this process writes: the n-th byte fails with EFBIG, as a full disk fails
/// with ENOSPC.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::size_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_limit_);
    rlimit limit = old_limit_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_limit_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_limit_{};
  sighandler_t old_handler_;
};

/// The message of the Error that `action` throws; empty when it throws none.
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(AtomicFile, ReplacesTheWholeFile) {
  const test::TempDir dir;
  write_file_atomic(dir.file("latest"), "a longer first text");
  write_file_atomic(dir.file("latest"), "second");
  EXPECT_EQ(test::read_text(dir.file("latest")), "second");
  write_file_atomic(dir.file("latest"), "");
  EXPECT_EQ(test::read_text(dir.file("latest")), "");
  EXPECT_THAT(dir.list(), ElementsAre("latest"));
}

TEST(AtomicFile, NothingIsVisibleBeforeCommitAndNothingLeftWithoutIt) {
  const test::TempDir dir;
  write_file_atomic(dir.file("x"), "old");
  {
    AtomicFile file(dir.file("x"));
    file.write_at(3, std::as_bytes(std::span("new", 3)));
    EXPECT_EQ(test::read_text(dir.file("x")), "old");
  }
  EXPECT_THAT(dir.list(), ElementsAre("x"));
  EXPECT_EQ(test::read_text(dir.file("x")), "old");
}

TEST(AtomicFile, ErrorsNameThePath) {
  const test::TempDir dir;
  const std::string nowhere = dir.file("no/such/folder/x");
  EXPECT_THAT(error_of([&] { write_file_atomic(nowhere, "x"); }),
              HasSubstr(nowhere + ": cannot create"));
  std::filesystem::create_directory(dir.file("folder"));
  EXPECT_THAT(error_of([&] { write_file_atomic(dir.file("folder"), "x"); }),
              HasSubstr("cannot rename"));
  EXPECT_THAT(dir.list(), ElementsAre("folder"));
}

// Writing fails after 0, 1, 2, ... bytes until it succeeds; each time the old file stays and
// nothing else is left.
TEST(AtomicFile, FailureAtEveryByteLeavesTheOldFile) {
  const test::TempDir dir;
  write_file_atomic(dir.file("x"), "old");
  const std::string text = "the new content";
  for (std::size_t limit = 0; limit <= text.size(); ++limit) {
    std::string message;
    {
      const FileSizeLimit cap(limit);
      message = error_of([&] { write_file_atomic(dir.file("x"), text); });
    }
    const bool fits = limit == text.size();
    EXPECT_EQ(message.empty(), fits) << limit;
    EXPECT_EQ(test::read_text(dir.file("x")), fits ? text : "old") << limit;
    EXPECT_THAT(dir.list(), ElementsAre("x")) << limit;
    if (!fits) {
      EXPECT_THAT(message, HasSubstr(dir.file("x") + ": cannot write: file too large"));
    }
  }
}

TEST(AtomicFile, FailureAtEveryByteOfACheckpointLeavesNothingToOpen) {
  const test::TempDir dir;
  const std::vector<std::uint8_t> data(40, 7);
  TensorInfo tensor;
  tensor.name = "w";
  tensor.dtype = DType::kU8;
  tensor.shape = {40};
  tensor.bytes = test::bytes_of(data);
  for (std::size_t limit = 0;; ++limit) {
    ASSERT_LT(limit, 1000U);
    std::string message;
    {
      const FileSizeLimit cap(limit);
      message = error_of([&] { write_checkpoint(dir.file("c"), std::span(&tensor, 1)); });
    }
    if (message.empty()) {
      ASSERT_GT(limit, 40U);
      break;
    }
    ASSERT_THAT(message, HasSubstr("model.safetensors: cannot write")) << limit;
    ASSERT_TRUE(std::filesystem::is_empty(dir.file("c"))) << limit;
    ASSERT_FALSE(Checkpoint::open(dir.file("c")).ok());
  }
  EXPECT_TRUE(Checkpoint::open(dir.file("c")).ok());
}

/// Runs `check` in a child that has a 64 KiB file system mounted at `path`, visible to nobody else.
/// Returns the child's exit code: 77 when the machine does not let us mount, 0 when `check` is
/// happy.
int on_small_disk(const std::string& path, const std::function<bool()>& check) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", path.c_str(), "tmpfs", 0, "size=64k") != 0) {
      ::_exit(77);
    }
    ::_exit(check() ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(AtomicFile, FullDiskIsNamedAndCleanedUp) {
  const test::TempDir dir;
  const int result = on_small_disk(dir.path(), [&] {
    write_file_atomic(dir.file("latest"), "old");
    const std::string big(100'000, 'x');
    const std::string text_error = error_of([&] { write_file_atomic(dir.file("latest"), big); });
    const std::string writer_error = error_of([&] {
      SafetensorsWriter writer(dir.file("m.safetensors"), {{"w", DType::kU8, {100'000}}});
      writer.write("w", std::as_bytes(std::span(big)));
      writer.finish();
    });
    write_file_atomic(dir.file("again"), "there is room once the temporary file is gone");
    return text_error == dir.file("latest") + ": cannot write: disk full" &&
           writer_error == dir.file("m.safetensors") + ": cannot write: disk full" &&
           test::read_text(dir.file("latest")) == "old" && dir.list().size() == 2;
  });
  if (result == 77) {
    GTEST_SKIP() << "this machine does not allow mounting a small tmpfs: " << std::strerror(errno);
  }
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace tandem
