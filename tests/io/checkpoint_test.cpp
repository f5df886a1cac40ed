#include "io/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/io_support.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Four tensors, 24 + 24 + 6 + 4 bytes.
class CheckpointTest : public ::testing::Test {
 protected:
  TensorInfo info(std::string name, DType dtype, std::vector<std::int64_t> shape,
                  std::span<const std::byte> bytes) const {
    TensorInfo result;
    result.name = std::move(name);
    result.dtype = dtype;
    result.shape = std::move(shape);
    result.bytes = bytes;
    return result;
  }
  [[nodiscard]] std::vector<TensorInfo> tensors() const {
    return {info("layers.1.w", DType::kF32, {2, 3}, test::bytes_of(f32_).subspan(0, 24)),
            info("layers.0.w", DType::kF32, {3, 2}, test::bytes_of(f32_).subspan(4, 24)),
            info("norm", DType::kBF16, {3}, test::bytes_of(bf16_)),
            info("vision.x", DType::kU8, {4}, test::bytes_of(u8_))};
  }
  /// An index over one shard "s.safetensors" with tensor "a", U8 [1].
  void write_shard(const std::string& file, const std::string& tensor) const {
    SafetensorsWriter writer(dir_.file(file), {{tensor, DType::kU8, {1}}});
    writer.write(tensor, test::bytes_of(u8_).first(1));
    writer.finish();
  }
  void write_index(std::string_view weight_map) const {
    test::write_text(dir_.file("model.safetensors.index.json"),
                     fmt::format(R"({{"metadata":{{}},"weight_map":{}}})", weight_map));
  }
  [[nodiscard]] std::string refusal() const {
    const auto checkpoint = Checkpoint::open(dir_.path());
    EXPECT_FALSE(checkpoint.ok());
    return checkpoint.ok() ? "" : checkpoint.message();
  }

  test::TempDir dir_;
  std::vector<float> f32_{1, 2, 3, 4, 5, 6, 7};
  std::vector<std::uint16_t> bf16_{0x3F80, 0x4000, 0x4040};
  std::vector<std::uint8_t> u8_{1, 2, 3, 4};
};

TEST_F(CheckpointTest, OneFileRoundTrip) {
  EXPECT_THAT(write_checkpoint(dir_.path(), tensors(), {.metadata = {{"step", "12"}}}),
              ElementsAre("model.safetensors"));
  EXPECT_THAT(dir_.list(), ElementsAre("model.safetensors"));
  auto checkpoint = Checkpoint::open(dir_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.message();
  EXPECT_THAT(checkpoint->names(), ElementsAre("layers.0.w", "layers.1.w", "norm", "vision.x"));
  EXPECT_EQ(checkpoint->metadata().at("step"), "12");
  EXPECT_THAT(checkpoint->find("layers.1.w")->copy<float>(), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(checkpoint->find("layers.2.w"), nullptr);
}

TEST_F(CheckpointTest, ShardsRoundTripForEverySizeLimit) {
  for (const std::int64_t limit : {1, 24, 33, 34, 48, 57, 58}) {
    const std::string dir = dir_.file(fmt::format("limit{}", limit));
    const auto files = write_checkpoint(dir, tensors(), {.max_shard_bytes = limit});
    EXPECT_EQ(files.size(), limit >= 58 ? 1U : limit >= 34 ? 3U : limit >= 24 ? 4U : 5U) << limit;
    const auto checkpoint = Checkpoint::open(dir);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.message();
    ASSERT_EQ(checkpoint->num_tensors(), 4);
    for (const TensorInfo& written : tensors()) {
      const TensorInfo* read = checkpoint->find(written.name);
      ASSERT_NE(read, nullptr) << written.name;
      EXPECT_EQ(static_cast<const TensorSpec&>(*read), written);
      EXPECT_TRUE(std::ranges::equal(read->bytes, written.bytes)) << written.name;
    }
  }
}

TEST_F(CheckpointTest, SameTensorsSameBytesInAnyOrder) {
  std::vector<TensorInfo> shuffled = tensors();
  std::swap(shuffled[0], shuffled[3]);
  const auto files = write_checkpoint(dir_.file("a"), tensors(), {.max_shard_bytes = 34});
  EXPECT_EQ(write_checkpoint(dir_.file("b"), shuffled, {.max_shard_bytes = 34}), files);
  EXPECT_THAT(files,
              ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                          "model.safetensors.index.json"));
  for (const std::string& file : files) {
    EXPECT_EQ(test::read_text(dir_.file("a/" + file)), test::read_text(dir_.file("b/" + file)));
  }
}

TEST_F(CheckpointTest, TakeChecksTypeAndShapeAndTracksUse) {
  write_checkpoint(dir_.path(), tensors());
  auto checkpoint = *Checkpoint::open(dir_.path());
  const std::vector<std::int64_t> shape{2, 3};
  EXPECT_EQ(checkpoint.take("layers.1.w", DType::kBF16, shape).message(),
            fmt::format("checkpoint {}: tensor layers.1.w: expected dtype BF16, found F32 in shard "
                        "model.safetensors",
                        dir_.path()));
  EXPECT_EQ(
      checkpoint.take("layers.0.w", DType::kF32, shape).message(),
      fmt::format("checkpoint {}: tensor layers.0.w: expected shape [2, 3], found [3, 2] in shard "
                  "model.safetensors",
                  dir_.path()));
  EXPECT_EQ(checkpoint.take("layers.7.w", {DType::kF32, DType::kBF16}, shape).message(),
            fmt::format(
                "checkpoint {}: tensor layers.7.w: expected F32 or BF16 [2, 3], found in no shard",
                dir_.path()));
  EXPECT_EQ(checkpoint.unused().size(), 4U);  // a refused take uses nothing
  const auto taken = checkpoint.take("layers.1.w", {DType::kF32, DType::kBF16}, shape);
  ASSERT_TRUE(taken.ok()) << taken.message();
  EXPECT_THAT(taken->copy<float>(), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(checkpoint.unused(), ElementsAre("layers.0.w", "norm", "vision.x"));
  checkpoint.skip_prefix("vision.");
  EXPECT_THAT(checkpoint.unused(), ElementsAre("layers.0.w", "norm"));
}

TEST_F(CheckpointTest, FolderWithoutOrWithTwoCheckpointsIsRefused) {
  EXPECT_THAT(
      refusal(),
      HasSubstr("expected model.safetensors or model.safetensors.index.json, found neither"));
  write_shard("model.safetensors", "a");
  write_index(R"({"a":"model.safetensors"})");
  EXPECT_THAT(refusal(), HasSubstr("found both"));
  EXPECT_THROW(write_checkpoint(dir_.path(), tensors()), Error);
}

TEST_F(CheckpointTest, InterruptedWriteCannotBeOpened) {
  const auto files = write_checkpoint(dir_.path(), tensors(), {.max_shard_bytes = 1});
  std::filesystem::remove(dir_.file(files.back()));  // the index is written last
  EXPECT_THAT(refusal(), HasSubstr("found neither"));
  EXPECT_THROW(write_checkpoint(dir_.path(), tensors()),
               Error);  // old shards would mix with new ones
}

TEST_F(CheckpointTest, IndexAndShardsMustAgree) {
  write_shard("s.safetensors", "a");
  write_index(R"({"a":"s.safetensors"})");
  EXPECT_TRUE(Checkpoint::open(dir_.path()).ok());
  write_index(R"({"a":"s.safetensors","b":"s.safetensors"})");
  EXPECT_THAT(refusal(),
              HasSubstr("tensor b: expected in shard s.safetensors by the index, not found"));
  write_shard("t.safetensors", "c");
  write_index(R"({"a":"t.safetensors","c":"s.safetensors"})");
  EXPECT_THAT(refusal(), HasSubstr("tensor a: expected in shard t.safetensors"));
  write_shard("t.safetensors", "a");
  write_index(R"({"a":"s.safetensors","b":"t.safetensors"})");
  EXPECT_THAT(refusal(), HasSubstr("tensor a: in two shards, s.safetensors and t.safetensors"));
  SafetensorsWriter writer(dir_.file("s.safetensors"),
                           {{"a", DType::kU8, {0}}, {"z", DType::kU8, {0}}});
  writer.finish();
  write_index(R"({"a":"s.safetensors"})");
  EXPECT_THAT(refusal(), HasSubstr("tensor z: in shard s.safetensors but not in the index"));
  write_index(R"({"a":"missing.safetensors"})");
  EXPECT_THAT(refusal(), HasSubstr("missing.safetensors: cannot open"));
}

TEST_F(CheckpointTest, TruncatedShardIsNamed) {
  const auto files = write_checkpoint(dir_.path(), tensors(), {.max_shard_bytes = 24});
  const std::string shard = dir_.file(files[1]);
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
  EXPECT_THAT(refusal(), HasSubstr(files[1]));
}

TEST_F(CheckpointTest, ShardNamesOutsideTheFolderAreRefused) {
  // The files exist, so that only the name check stands between the index and them.
  write_shard("outside.safetensors", "a");
  std::filesystem::create_directories(dir_.file("ckpt/sub"));
  std::filesystem::copy(dir_.file("outside.safetensors"), dir_.file("ckpt/sub/x.safetensors"));
  for (const std::string& name :
       {std::string("../outside.safetensors"), dir_.file("outside.safetensors"),
        std::string("sub/x.safetensors"), std::string("./x.safetensors"),
        std::string("..\\\\outside.safetensors"), std::string("..safetensors"),
        std::string(".safetensors"), std::string("a\\u0000.safetensors"),
        std::string("a\\n.safetensors"), std::string("model.bin"), std::string("")}) {
    test::write_text(dir_.file("ckpt/model.safetensors.index.json"),
                     fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", name));
    const auto checkpoint = Checkpoint::open(dir_.file("ckpt"));
    ASSERT_FALSE(checkpoint.ok()) << name;
    EXPECT_THAT(checkpoint.message(), HasSubstr("tensor \"a\": expected a file name")) << name;
  }
}

TEST_F(CheckpointTest, BadIndexFilesAreRefused) {
  const auto message = [](std::string_view text) {
    const auto index = parse_checkpoint_index("index", text);
    EXPECT_FALSE(index.ok()) << text;
    return index.ok() ? "" : index.message();
  };
  EXPECT_THAT(message(""), HasSubstr("index: bad JSON"));
  EXPECT_THAT(message("[]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(message("{}"), HasSubstr("weight_map"));
  EXPECT_THAT(message(R"({"weight_map":[]})"), HasSubstr("weight_map: expected an object"));
  EXPECT_THAT(message(R"({"weight_map":{"a":1}})"), HasSubstr("expected the file name"));
  EXPECT_THAT(message(R"({"weight_map":{},"x":1})"), HasSubstr("unknown key \"x\""));
  EXPECT_THAT(message(R"({"weight_map":{"a":"a.safetensors","a":"b.safetensors"}})"),
              HasSubstr("duplicate key \"a\""));
  EXPECT_THAT(message("{\"metadata\":" + std::string(1'000'000, '[')), HasSubstr("nested deeper"));
  EXPECT_THAT(message("{\"metadata\":{\"x\":1e999},\"weight_map\":{}}"), HasSubstr("bad JSON"));
}

TEST_F(CheckpointTest, StemsLiveSideBySide) {
  write_checkpoint(dir_.path(), tensors());
  write_checkpoint(dir_.path(), tensors(), {.stem = "optimizer", .max_shard_bytes = 1});
  EXPECT_TRUE(Checkpoint::open(dir_.path()).ok());
  EXPECT_TRUE(Checkpoint::open(dir_.path(), "optimizer").ok());
}

}  // namespace
}  // namespace tandem
