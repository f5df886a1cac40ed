#include "io/safetensors.h"

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fuzz/targets.h"
#include "io/io_support.h"

namespace tandem {
namespace {

using test::image_of;
using test::parse;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kOne = R"({"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})";

/// Parses `header` over 8 bytes of data and returns the message; fails the test when it parses.
std::string refusal(std::string_view header, std::string_view data = "12345678") {
  const auto contents = parse(image_of(header, data));
  EXPECT_FALSE(contents.ok()) << header;
  return contents.ok() ? "" : contents.message();
}

/// The one-tensor header with a field replaced by other JSON.
std::string entry(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return fmt::format(R"({{"w":{{"dtype":{},"shape":{},"data_offsets":{}}}}})", dtype, shape,
                     offsets);
}

void write_sample(const std::string& path) {
  const std::vector<float> f32{1.5F, -2.0F, 0.25F, 3.0F, -0.0F, 6.0F};
  const std::vector<std::uint16_t> bf16{0x3F80, 0xC000, 0x7FC0};
  const std::vector<std::uint8_t> u8{0xB2, 0x00, 0xFF};
  SafetensorsWriter writer(path,
                           {{"b.u8", DType::kU8, {3, 1}},
                            {"a.bf16", DType::kBF16, {3}},
                            {"c.f32", DType::kF32, {2, 3}},
                            {"empty", DType::kF32, {0, 7}},
                            {"scalar", DType::kF32, {}}},
                           {{"format", "pt"}, {"note", "\"quoted\" \xC3\xA9"}});
  writer.write("c.f32", test::bytes_of(f32).first(10));  // pieces, in any order
  writer.write("b.u8", test::bytes_of(u8));
  writer.write("a.bf16", test::bytes_of(bf16));
  writer.write("scalar", test::bytes_of(std::vector<float>{7.0F}));
  writer.write("c.f32", test::bytes_of(f32).subspan(10));
  writer.finish();
}

TEST(Safetensors, RoundTrip) {
  const test::TempDir dir;
  const std::string path = dir.file("x.safetensors");
  write_sample(path);
  EXPECT_THAT(dir.list(), ElementsAre("x.safetensors"));
  auto opened = SafetensorsFile::open(path);
  ASSERT_TRUE(opened.ok()) << opened.message();
  const SafetensorsFile file = *std::move(opened);  // moving keeps the spans valid
  std::vector<std::string> names;
  for (const TensorInfo& info : file.tensors()) {
    names.push_back(info.name);
  }
  EXPECT_THAT(names, ElementsAre("a.bf16", "b.u8", "c.f32", "empty", "scalar"));
  EXPECT_EQ(file.metadata().at("note"), "\"quoted\" \xC3\xA9");
  const TensorInfo* c = file.find("c.f32");
  ASSERT_NE(c, nullptr);
  EXPECT_EQ(c->dtype, DType::kF32);
  EXPECT_THAT(c->shape, ElementsAre(2, 3));
  EXPECT_THAT(c->copy<float>(), ElementsAre(1.5F, -2.0F, 0.25F, 3.0F, -0.0F, 6.0F));
  EXPECT_THAT(file.find("a.bf16")->copy<std::uint16_t>(), ElementsAre(0x3F80, 0xC000, 0x7FC0));
  EXPECT_THAT(file.find("b.u8")->copy<std::uint8_t>(), ElementsAre(0xB2, 0x00, 0xFF));
  EXPECT_THAT(file.find("empty")->copy<float>(), IsEmpty());
  EXPECT_THAT(file.find("scalar")->copy<float>(), ElementsAre(7.0F));
  EXPECT_EQ(file.find("c.f3"), nullptr);
  EXPECT_EQ(file.find("z"), nullptr);
}

TEST(Safetensors, WriterIsDeterministicAndAligned) {
  const test::TempDir dir;
  write_sample(dir.file("a"));
  write_sample(dir.file("b"));
  EXPECT_EQ(test::read_text(dir.file("a")), test::read_text(dir.file("b")));
  const auto file = SafetensorsFile::open(dir.file("a"));
  for (const TensorInfo& info : file->tensors()) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(info.bytes.data()) % usize(dtype_size(info.dtype)),
              0U)
        << info.name;
  }
  // The order in which specs are given does not matter either.
  const std::vector<TensorSpec> specs{{"a", DType::kU8, {3}}, {"b", DType::kF32, {1}}};
  const std::vector<TensorSpec> reversed{specs[1], specs[0]};
  EXPECT_EQ(plan_safetensors(specs, {}).header, plan_safetensors(reversed, {}).header);
  EXPECT_EQ(plan_safetensors(specs, {}).header.size() % 8, 0U);
}

TEST(Safetensors, EveryTruncationAndAnExtraByteAreRefused) {
  const test::TempDir dir;
  write_sample(dir.file("whole"));
  const std::string whole = test::read_text(dir.file("whole"));
  ASSERT_TRUE(parse(whole).ok());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    test::write_text(dir.file("cut"), whole.substr(0, size));
    const auto cut = SafetensorsFile::open(dir.file("cut"));
    ASSERT_FALSE(cut.ok()) << size << " of " << whole.size();
    ASSERT_THAT(cut.message(), HasSubstr(dir.file("cut")));
  }
  EXPECT_THAT(parse(whole + "x").message(), HasSubstr("bytes of data after the header"));
}

TEST(Safetensors, EveryBitFlipOfLengthAndHeaderIsAnErrorOrASoundParse) {
  const test::TempDir dir;
  write_sample(dir.file("whole"));
  const std::string whole = test::read_text(dir.file("whole"));
  const std::size_t data_bytes = 3 * 2 + 3 + 6 * 4 + 4;
  int refused = 0;
  const std::size_t bits = 8 * (whole.size() - data_bytes);
  for (std::size_t bit = 0; bit < bits; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] =
        static_cast<char>(static_cast<unsigned char>(flipped[bit / 8]) ^ (1U << bit % 8));
    fuzz::check_safetensors(flipped);  // aborts on an unsound parse
    refused += parse(flipped).ok() ? 0 : 1;
  }
  EXPECT_GT(refused, static_cast<int>(bits) /
                         2);  // only flips inside names, notes and equal-sized types may pass
}

TEST(Safetensors, MissingFileAndFolderAreNamed) {
  const test::TempDir dir;
  EXPECT_THAT(SafetensorsFile::open(dir.file("none")).message(), HasSubstr(dir.file("none")));
  EXPECT_THAT(SafetensorsFile::open(dir.path()).message(), HasSubstr("regular file"));
}

TEST(Safetensors, HostileLengths) {
  std::string image = image_of(kOne, "12345678");
  ASSERT_TRUE(parse(image).ok());
  const std::uint64_t lengths[] = {
      std::uint64_t{1} << 63, ~std::uint64_t{0}, ~std::uint64_t{0} - 7, 100'000'001, 100'000'000,
      kOne.size() + 9};
  for (const std::uint64_t length : lengths) {
    std::memcpy(image.data(), &length, sizeof(length));
    EXPECT_THAT(parse(image).message(), HasSubstr("header length: expected at most")) << length;
  }
}

TEST(Safetensors, HostileShapes) {
  EXPECT_THAT(
      refusal(entry("\"F32\"", "[4611686018427387904,4]", "[0,8]")),
      HasSubstr("test.safetensors: tensor \"w\": shape [4611686018427387904, 4]: size overflows"));
  // The true size is 2^64 + 8, which wraps to 8.
  EXPECT_THAT(refusal(entry("\"U8\"", "[9223372036854775807,2,5]", "[0,8]")),
              HasSubstr("overflows"));
  EXPECT_THAT(refusal(entry("\"F64\"", "[2305843009213693953]", "[0,8]")), HasSubstr("overflows"));
  // A zero extent does not excuse the others, wherever it stands.
  for (const char* shape : {"[9223372036854775807,2,0]", "[0,9223372036854775807,2]"}) {
    EXPECT_THAT(refusal(entry("\"U8\"", shape, "[0,0]"), ""), HasSubstr("overflows")) << shape;
  }
  for (const char* shape :
       {"[-2]", "[2.0]", "[1e999]", "[1e2]", "[18446744073709551616]", "[9223372036854775808]",
        "[\"2\"]", "[null]", "[-0]", "2", "{}", "null", "[[2]]"}) {
    EXPECT_THAT(refusal(entry("\"F32\"", shape, "[0,8]")),
                ::testing::AnyOf(HasSubstr("shape"), HasSubstr("header")))
        << shape;
  }
  EXPECT_THAT(refusal(entry("\"F32\"", "[3]", "[0,8]")),
              HasSubstr("expected 12 bytes for F32 [3], found 8"));
  EXPECT_THAT(refusal(entry("\"F32\"", "[]", "[0,8]")), HasSubstr("expected 4 bytes"));
}

TEST(Safetensors, HostileOffsets) {
  for (const char* offsets :
       {"[0,9]", "[8,0]", "[0,9223372036854775807]", "[9223372036854775800,9223372036854775807]"}) {
    EXPECT_THAT(refusal(entry("\"F32\"", "[2]", offsets)),
                HasSubstr("expected a range within the 8 bytes"))
        << offsets;
  }
  for (const char* offsets : {"[0]", "[0,8,8]", "[-8,0]", "[0.0,8]", "[0,8.0]", "[0,1e999]",
                              "[0,18446744073709551616]", "8", "[\"0\",8]", "null", "{}"}) {
    EXPECT_THAT(refusal(entry("\"F32\"", "[2]", offsets)),
                ::testing::AnyOf(HasSubstr("data_offsets"), HasSubstr("header")))
        << offsets;
  }
}

TEST(Safetensors, OverlapsAndGapsAreRefused) {
  const auto two = [](const char* first, const char* second) {
    return fmt::format(R"({{"a":{{"dtype":"U8","shape":[4],"data_offsets":{}}},)"
                       R"("b":{{"dtype":"U8","shape":[4],"data_offsets":{}}}}})",
                       first, second);
  };
  EXPECT_TRUE(parse(image_of(two("[0,4]", "[4,8]"), "12345678")).ok());
  EXPECT_TRUE(parse(image_of(two("[4,8]", "[0,4]"), "12345678")).ok());
  EXPECT_THAT(refusal(two("[0,4]", "[0,4]")), HasSubstr("overlaps another tensor"));
  EXPECT_THAT(refusal(two("[0,4]", "[3,7]")),
              HasSubstr("\"b\": data_offsets: expected to start at 4"));
  EXPECT_THAT(refusal(two("[0,4]", "[5,9]"), "123456789"), HasSubstr("gap before it"));
  EXPECT_THAT(refusal(two("[1,5]", "[5,9]"), "123456789"), HasSubstr("\"a\""));
  EXPECT_THAT(refusal(two("[0,4]", "[4,8]"), "123456789"), HasSubstr("expected 8 bytes of data"));
}

TEST(Safetensors, HeadersThatAreNotTheFormat) {
  EXPECT_THAT(refusal(""), HasSubstr("expected a JSON object"));
  EXPECT_THAT(refusal("[]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(refusal(" " + kOne), HasSubstr("expected a JSON object"));
  EXPECT_THAT(refusal("\xEF\xBB\xBF" + kOne), HasSubstr("expected a JSON object"));
  EXPECT_THAT(refusal(kOne + "x"), HasSubstr("header: bad JSON"));
  EXPECT_THAT(refusal(kOne + std::string(1, '\0')), HasSubstr("NUL byte"));
  EXPECT_THAT(refusal(kOne.substr(0, kOne.size() - 1)), HasSubstr("header: bad JSON"));
  EXPECT_THAT(refusal(R"({"w":3})"), HasSubstr("tensor \"w\": expected an object"));
  EXPECT_THAT(refusal(R"({"w":{"dtype":"U8","shape":[8]}})"), HasSubstr("expected the keys"));
  EXPECT_THAT(refusal(R"({"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8],"x":1}})"),
              HasSubstr("unknown key \"x\""));
  EXPECT_THAT(refusal(entry("\"F31\"", "[2]", "[0,8]")), HasSubstr("unknown type \"F31\""));
  EXPECT_THAT(refusal(entry("\"f32\"", "[2]", "[0,8]")), HasSubstr("unknown type"));
  EXPECT_THAT(refusal(entry("32", "[2]", "[0,8]")), HasSubstr("dtype: expected a string"));
  EXPECT_TRUE(parse(image_of(kOne + "    ", "12345678")).ok());  // padding is part of the format
  EXPECT_TRUE(parse(image_of("{}")).ok());
}

TEST(Safetensors, DuplicateNamesAndKeysAreRefused) {
  const std::string body = kOne.substr(1, kOne.size() - 2);
  EXPECT_THAT(refusal("{" + body + "," + body + "}"), HasSubstr("duplicate key \"w\""));
  // The same name spelled with an escape.
  std::string escaped = body;
  escaped.replace(escaped.find("\"w\""), 3, "\"\\u0077\"");
  EXPECT_THAT(refusal("{" + body + "," + escaped + "}"), HasSubstr("duplicate key \"w\""));
  EXPECT_THAT(refusal(R"({"w":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}})"),
              HasSubstr("duplicate key \"dtype\""));
}

TEST(Safetensors, NamesMustBeUtf8) {
  std::string bad = kOne;
  bad.replace(bad.find("\"w\""), 3, "\"\xFF\xFE\"");
  EXPECT_THAT(refusal(bad), HasSubstr("header: bad JSON"));
  bad = kOne;
  bad.replace(bad.find("\"w\""), 3, "\"\xC0\xAF\"");  // overlong
  EXPECT_THAT(refusal(bad), HasSubstr("header: bad JSON"));
  bad = kOne;
  bad.replace(bad.find("\"w\""), 3, "\"\\ud800\"");  // lone surrogate
  EXPECT_THAT(refusal(bad), HasSubstr("header: bad JSON"));
}

TEST(Safetensors, DeepNestingIsRefusedBeforeParsing) {
  const std::string deep =
      "{\"w\":" + std::string(5'000'000, '[') + std::string(5'000'000, ']') + "}";
  EXPECT_THAT(refusal(deep), HasSubstr("nested deeper than 3 levels"));
  std::string objects = "{\"w\":";
  for (int i = 0; i < 100'000; ++i) {
    objects += "{\"a\":";
  }
  EXPECT_THAT(refusal(objects), HasSubstr("nested deeper"));
  // Brackets inside a name are text.
  std::string name = kOne;
  name.replace(name.find("\"w\""), 3, "\"[[[[{{{{\\\"[[[[\"");
  EXPECT_TRUE(parse(image_of(name, "12345678")).ok());
}

TEST(Safetensors, MetadataHoldsStringsOnly) {
  const auto with = [](const char* metadata) {
    return fmt::format(R"({{"__metadata__":{},{})", metadata, kOne.substr(1));
  };
  const auto good = parse(image_of(with(R"({"a":"1","b":""})"), "12345678"));
  ASSERT_TRUE(good.ok()) << good.message();
  EXPECT_EQ(good->metadata, (Metadata{{"a", "1"}, {"b", ""}}));
  EXPECT_EQ(good->tensors.size(), 1U);
  EXPECT_THAT(refusal(with(R"({"a":1})")), HasSubstr("__metadata__: key \"a\": expected a string"));
  EXPECT_THAT(refusal(with(R"({"a":{"b":"c"}})")), HasSubstr("expected a string"));
  EXPECT_THAT(refusal(with("[]")), HasSubstr("__metadata__: expected an object"));
  EXPECT_THAT(refusal(with(R"({"a":"1","a":"2"})")), HasSubstr("duplicate key \"a\""));
}

TEST(SafetensorsDeathTest, MisuseOfTheWriterAborts) {
  const test::TempDir dir;
  const std::vector<std::uint8_t> bytes(4);
  const auto use = [&](auto action) {
    SafetensorsWriter writer(dir.file("x"), {{"a", DType::kU8, {3}}});
    action(writer);
  };
  EXPECT_DEATH(use([&](auto& w) { w.write("b", test::bytes_of(bytes)); }), "b");
  EXPECT_DEATH(use([&](auto& w) { w.write("a", test::bytes_of(bytes)); }), "a");
  EXPECT_DEATH(use([&](auto& w) { w.finish(); }), "bytes missing");
  EXPECT_DEATH(SafetensorsWriter(dir.file("x"), {{"a", DType::kU8, {3}}, {"a", DType::kU8, {2}}}),
               "two tensors of one name");
}

}  // namespace
}  // namespace tandem
