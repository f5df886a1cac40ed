// What a fingerprint must see and what it must not.
#include "io/fingerprint.h"

#include <gtest/gtest.h>

#include "io/atomic_file.h"
#include "support/temp_dir.h"

namespace tandem::test {
namespace {

std::vector<std::byte> pattern(std::int64_t size) {
  std::vector<std::byte> bytes(usize(size));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  }
  return bytes;
}

TensorInfo tensor(std::string name, std::span<const std::byte> bytes) {
  TensorInfo info;
  info.name = std::move(name);
  info.dtype = DType::kU8;
  info.shape = {isize(bytes)};
  info.bytes = bytes;
  return info;
}

TEST(Fingerprint, ChangesWithEveryByteOfASmallCheckpoint) {
  std::vector<std::byte> a = pattern(100);
  const std::vector<std::byte> b = pattern(33);
  const auto of = [&] { return fingerprint(Checkpoint::of("", {tensor("a", a), tensor("b", b)})); };
  const std::string before = of();
  EXPECT_EQ(before.size(), 16U);
  for (std::byte& byte : a) {
    byte ^= std::byte{0x10};
    EXPECT_NE(of(), before);
    byte ^= std::byte{0x10};
  }
  EXPECT_EQ(of(), before);
  EXPECT_NE(fingerprint(Checkpoint::of("", {tensor("a", b), tensor("b", a)})), before);
  TensorInfo other_shape = tensor("a", a);
  other_shape.shape = {10, 10};
  EXPECT_NE(fingerprint(Checkpoint::of("", {other_shape, tensor("b", b)})), before);
  EXPECT_NE(fingerprint(Checkpoint::of("", {tensor("a", a)})), before);
}

TEST(Fingerprint, SamplesEveryTensorOfALargeOne) {
  std::vector<std::byte> large = pattern(kFingerprintStride * 2 + 100'000);
  std::vector<std::byte> small = pattern(3000);
  const auto of = [&] {
    return fingerprint(Checkpoint::of("", {tensor("a", large), tensor("b", small)}), 1000);
  };
  const std::string before = of();
  const auto is_seen = [&](std::byte& byte) {
    byte ^= std::byte{1};
    const bool differs = of() != before;
    byte ^= std::byte{1};
    return differs;
  };
  for (std::byte& byte : small) {
    ASSERT_TRUE(is_seen(byte));
  }
  const std::size_t stride = usize(kFingerprintStride);
  for (const std::size_t at : {std::size_t{0}, std::size_t{4095}, stride, stride + 4095, 2 * stride,
                               large.size() - 4096, large.size() - 1}) {
    EXPECT_TRUE(is_seen(large[at])) << at;
  }
  EXPECT_FALSE(is_seen(large[stride - 1])) << "it would take as long as reading everything";
  EXPECT_EQ(of(), before);
}

TEST(Fingerprint, OfAFolderCoversConfigAndWeightsButNotTheirFiles) {
  const std::vector<std::byte> a = pattern(64);
  const std::vector<std::byte> b = pattern(80);
  const TempDir root;
  const auto write = [&](const std::string& name, std::int64_t max_shard_bytes) {
    const std::string dir = root.path() + "/" + name;
    const std::vector<TensorInfo> tensors{tensor("a", a), tensor("b", b)};
    write_checkpoint(dir, tensors, {.max_shard_bytes = max_shard_bytes});
    write_file_atomic(dir + "/config.json", "{}");
    return dir;
  };
  const std::string one = write("one", 1000);
  const std::string two = write("two", 70);
  const std::string before = model_fingerprint(one).value_or_throw();
  EXPECT_EQ(model_fingerprint(two).value_or_throw(), before);
  write_file_atomic(two + "/config.json", "{ }");
  EXPECT_NE(model_fingerprint(two).value_or_throw(), before);
  EXPECT_FALSE(model_fingerprint(root.path()).ok());
}

}  // namespace
}  // namespace tandem::test
