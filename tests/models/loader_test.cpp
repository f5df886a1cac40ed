// What the loader refuses, and that it says which tensor and what it expected.
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <tuple>

#include <gmock/gmock.h>

#include "io/checkpoint.h"
#include "models/kimi_k3/init.h"
#include "models/kimi_k3/model.h"
#include "support/op_test.h"
#include "support/temp_dir.h"

namespace tandem::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kLayer1 = "language_model.model.layers.1.";
const std::string kNorm = kLayer1 + "input_layernorm.weight";
const std::string kExpert = kLayer1 + "block_sparse_moe.experts.3.w2";

/// The tensors of a checkpoint, to be damaged. k3-nano: hidden 128, 8 experts, latent 64, F 128.
class Tensors {
 public:
  explicit Tensors(const kimi_k3::InitOptions& options = {}) {
    // Made once for each kind of checkpoint a test damages.
    static std::map<std::tuple<kimi_k3::ExpertFormat, bool, bool>, Undamaged> made;
    Undamaged& undamaged = made[{options.experts, options.fp8_attention, options.bf16}];
    if (undamaged.tensors.empty()) {
      undamaged = make(options);
    }
    all_ = undamaged.tensors;
    config_ = undamaged.config;
  }

  void remove(const std::string& name) { ASSERT_EQ(all_.erase(name), 1U) << name; }
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
    TensorSpec spec{name, dtype, std::move(shape)};
    std::vector<std::byte> bytes(usize(spec.size_bytes()));
    all_[name] = {std::move(spec), std::move(bytes)};
  }
  /// The tensor with another dtype or shape, of zeros.
  void replace(const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
    remove(name);
    add(name, dtype, std::move(shape));
  }
  template <typename T>
  void set(const std::string& name, std::size_t index, T value) {
    std::vector<std::byte>& bytes = all_.at(name).bytes;
    ASSERT_LE((index + 1) * sizeof(T), bytes.size());
    std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
  }

  void write(const std::string& dir) const {
    std::vector<TensorInfo> infos;
    for (const auto& [name, tensor] : all_) {
      infos.push_back({tensor.spec, tensor.bytes});
    }
    write_checkpoint(dir, infos);
    std::ofstream(dir + "/config.json") << config_;
  }
  /// What loading says, for inference and for training; both must refuse with the same words.
  [[nodiscard]] std::string message() const {
    const TempDir dir;
    write(dir.path());
    return message_of(dir.path());
  }
  static std::string message_of(const std::string& dir) {
    const TestContext context(1);
    const auto inference = kimi_k3::KimiK3::load(*context, dir, {.trainable = false});
    const auto training = kimi_k3::KimiK3::load(*context, dir, {.trainable = true});
    if (inference.ok() || training.ok()) {
      return "";
    }
    EXPECT_EQ(inference.message(), training.message());
    return inference.message();
  }

 private:
  struct Owned {
    TensorSpec spec;
    std::vector<std::byte> bytes;
  };
  struct Undamaged {
    std::map<std::string, Owned> tensors;
    std::string config;
  };
  static Undamaged make(const kimi_k3::InitOptions& options) {
    const TempDir dir;
    kimi_k3::write_initial_checkpoint(*kimi_k3::find_preset("k3-nano"), options, dir.path());
    const Checkpoint checkpoint = Checkpoint::open(dir.path()).value_or_throw();
    Undamaged made;
    for (const std::string& name : checkpoint.names()) {
      const TensorInfo& info = *checkpoint.find(name);
      made.tensors[name] = {info, {info.bytes.begin(), info.bytes.end()}};
    }
    std::ifstream in(dir.path() + "/config.json");
    made.config = {std::istreambuf_iterator<char>(in), {}};
    return made;
  }

  std::map<std::string, Owned> all_;
  std::string config_;
};

TEST(Loader, TheUndamagedTensorsLoad) {
  for (const auto experts : {kimi_k3::ExpertFormat::kPlain, kimi_k3::ExpertFormat::kMxFp4,
                             kimi_k3::ExpertFormat::kNvFp4}) {
    const Tensors tensors({.experts = experts, .fp8_attention = true});
    const TempDir dir;
    tensors.write(dir.path());
    const TestContext context(1);
    EXPECT_TRUE(kimi_k3::KimiK3::load(*context, dir.path(), {}).ok());
    EXPECT_TRUE(kimi_k3::KimiK3::load(*context, dir.path(), {.trainable = true}).ok());
  }
}

TEST(Loader, MissingTensorsAreNamedWithTheirShape) {
  const std::pair<std::string, const char*> cases[] = {
      {kNorm, "[128]"},
      {"language_model.lm_head.weight", "[128, 128]"},
      {"language_model.model.output_attn_res_proj.weight", "[1, 128]"},
      {kLayer1 + "block_sparse_moe.gate.e_score_correction_bias", "[8]"},
      {kLayer1 + "self_attn.q_conv1d.weight", "[128, 1, 4]"},
      {kExpert + ".weight", "[64, 128]"},
  };
  for (const auto& [name, shape] : cases) {
    Tensors tensors;
    tensors.remove(name);
    EXPECT_THAT(tensors.message(), AllOf(HasSubstr("tensor " + name + ":"), HasSubstr(shape),
                                         HasSubstr("found in no")));
  }
}

TEST(Loader, MissingPartsOfAQuantisedMatrixAreNamed) {
  const auto without = [](const kimi_k3::InitOptions& options, const std::string& name) {
    Tensors tensors(options);
    tensors.remove(name);
    EXPECT_THAT(tensors.message(), HasSubstr("tensor " + name + ": expected"));
  };
  without({.experts = kimi_k3::ExpertFormat::kMxFp4}, kExpert + ".weight_scale");
  without({.experts = kimi_k3::ExpertFormat::kNvFp4}, kExpert + ".weight_scale");
  without({.experts = kimi_k3::ExpertFormat::kNvFp4}, kExpert + ".weight_scale_2");
  without({.experts = kimi_k3::ExpertFormat::kNvFp4}, kExpert + ".input_scale");
  without({.fp8_attention = true}, kLayer1 + "self_attn.o_proj.weight_scale");
}

TEST(Loader, LeftoverTensorsAreNamed) {
  for (const std::string& name :
       {kLayer1 + "self_attn.rotary.inv_freq", kLayer1 + "block_sparse_moe.experts.8.w1.weight",
        std::string("language_model.model.layers.3.input_layernorm.weight")}) {
    Tensors tensors;
    tensors.add(name, DType::kF32, {4});
    EXPECT_THAT(tensors.message(),
                AllOf(HasSubstr("1 tensors the model does not have"), HasSubstr(name)));
  }
}

TEST(Loader, ScalesOfAPlainMatrixAreLeftovers) {
  Tensors tensors;
  tensors.add(kExpert + ".weight_scale", DType::kF32, {1});
  EXPECT_THAT(tensors.message(), HasSubstr(kExpert + ".weight_scale"));
}

// Parts of the checkpoint that the text model skips on purpose.
TEST(Loader, VisionTensorsAreSkipped) {
  Tensors tensors;
  tensors.add("vision_tower.patch_embed.weight", DType::kBF16, {3, 2});
  tensors.add("mm_projector.proj.weight", DType::kBF16, {2});
  EXPECT_EQ(tensors.message(), "");
}

TEST(Loader, WrongShapesAndTypesAreNamedWithWhatWasExpected) {
  struct Case {
    std::string name;
    DType dtype;
    std::vector<std::int64_t> shape;
    const char* expected;
    const char* found;
  };
  const Case cases[] = {
      {kNorm, DType::kF32, {127}, "[128]", "[127]"},
      {kNorm, DType::kF32, {1, 128}, "[128]", "[1, 128]"},
      {kNorm, DType::kI32, {128}, "F32", "I32"},
      {"language_model.model.embed_tokens.weight",
       DType::kF32,
       {129, 128},
       "[128, 128]",
       "[129, 128]"},
      {kExpert + ".weight", DType::kF32, {128, 64}, "[64, 128]", "[128, 64]"},  // transposed
      {kExpert + ".weight", DType::kF16, {64, 128}, "F32 or BF16", "F16"},
      {kLayer1 + "self_attn.A_log", DType::kF32, {3}, "[4]", "[3]"},
  };
  for (const Case& c : cases) {
    Tensors tensors;
    tensors.replace(c.name, c.dtype, c.shape);
    EXPECT_THAT(tensors.message(), AllOf(HasSubstr("tensor " + c.name + ":"), HasSubstr(c.expected),
                                         HasSubstr(c.found)));
  }
}

TEST(Loader, WrongShapesOfQuantisedPartsAreNamed) {
  const auto with = [](const kimi_k3::InitOptions& options, const std::string& name, DType dtype,
                       std::vector<std::int64_t> shape, const char* expected) {
    Tensors tensors(options);
    tensors.replace(name, dtype, std::move(shape));
    EXPECT_THAT(tensors.message(), AllOf(HasSubstr("tensor " + name + ":"), HasSubstr(expected)));
  };
  const kimi_k3::InitOptions mx{.experts = kimi_k3::ExpertFormat::kMxFp4};
  const kimi_k3::InitOptions nv{.experts = kimi_k3::ExpertFormat::kNvFp4, .fp8_attention = true};
  with(mx, kExpert + ".weight_packed", DType::kU8, {64, 128}, "[64, 64]");
  with(mx, kExpert + ".weight_scale", DType::kU8, {64, 8}, "[64, 4]");
  with(nv, kExpert + ".weight", DType::kU8, {64, 32}, "[64, 64]");
  with(nv, kExpert + ".weight_scale", DType::kF8E4M3, {64, 4}, "[64, 8]");
  with(nv, kExpert + ".weight_scale_2", DType::kF32, {2}, "one finite number");
  with(nv, kLayer1 + "self_attn.q_proj.weight_scale", DType::kF32, {1, 1, 2, 1}, "[1, 1, 1, 1]");
}

TEST(Loader, ScalesWithoutAValueAreNamed) {
  const auto with = [](const kimi_k3::InitOptions& options, const std::string& name,
                       std::size_t index, auto value, const std::string& matrix,
                       const char* expected) {
    Tensors tensors(options);
    tensors.set(name, index, value);
    EXPECT_THAT(tensors.message(), AllOf(HasSubstr("tensor " + matrix), HasSubstr(expected)));
  };
  const kimi_k3::InitOptions mx{.experts = kimi_k3::ExpertFormat::kMxFp4};
  const kimi_k3::InitOptions nv{.experts = kimi_k3::ExpertFormat::kNvFp4, .fp8_attention = true};
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::string q_proj = kLayer1 + "self_attn.q_proj";
  with(mx, kExpert + ".weight_scale", 4 * 5 + 2, std::uint8_t{0xFF}, kExpert,
       "scale[5, 2]: expected a power of two");
  with(nv, kExpert + ".weight_scale", 8 * 5 + 2, std::uint8_t{0x7F}, kExpert,
       "scale[5, 2]: expected a number");
  with(nv, kExpert + ".weight_scale_2", 0, kNaN, kExpert + ".weight_scale_2",
       "expected one finite number");
  with(nv, kExpert + ".weight_scale_2", 0, kInf, kExpert + ".weight_scale_2",
       "expected one finite number");
  with(nv, q_proj + ".weight_scale", 0, kNaN, q_proj, "scale[0, 0]: expected a finite number");
  with(nv, q_proj + ".weight", 128 * 3 + 7, std::uint8_t{0xFF}, q_proj,
       "weight[3, 7]: expected a number");
}

TEST(Loader, PlainWeightsThatAreNoNumbersAreNamed) {
  const auto with = [](bool bf16, const std::string& name, std::size_t index, auto value,
                       const char* expected) {
    Tensors tensors({.bf16 = bf16});
    tensors.set(name, index, value);
    EXPECT_THAT(tensors.message(), AllOf(HasSubstr("tensor " + name + ":"), HasSubstr(expected)));
  };
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::string q_proj = kLayer1 + "self_attn.q_proj.weight";
  with(false, q_proj, 128 * 3 + 7, kNaN, "weight[3, 7]: expected a finite number");
  with(false, kNorm, 5, kInf, "weight[0, 5]: expected a finite number");
  with(false, "language_model.model.embed_tokens.weight", 128, -kInf, "weight[1, 0]");
  with(true, q_proj, 128 * 9 + 1, std::uint16_t{0x7FC0}, "weight[9, 1]");
  with(true, q_proj, 2, std::uint16_t{0xFF80}, "weight[0, 2]");
}

TEST(Loader, AQuantisedEmbeddingIsRefused) {
  const std::string base = "language_model.model.embed_tokens";
  Tensors both;
  both.add(base + ".weight_packed", DType::kU8, {128, 64});
  EXPECT_THAT(both.message(), HasSubstr(base + ".weight_packed"));
  Tensors tensors;
  tensors.replace(base + ".weight", DType::kF8E4M3, {128, 128});
  tensors.add(base + ".weight_scale", DType::kF32, {1, 1, 1, 1});
  EXPECT_THAT(tensors.message(), AllOf(HasSubstr(base + ".weight"), HasSubstr("F32 or BF16")));
}

TEST(Loader, ATruncatedFileIsRefused) {
  const TempDir dir;
  Tensors().write(dir.path());
  const std::string path = dir.path() + "/model.safetensors";
  const auto size = std::filesystem::file_size(path);
  for (const auto left : {size - 1, size / 2, std::uintmax_t{100}, std::uintmax_t{0}}) {
    std::filesystem::resize_file(path, left);
    EXPECT_THAT(Tensors::message_of(dir.path()),
                AllOf(HasSubstr("model.safetensors"), HasSubstr("expected")))
        << left;
  }
}

// A header whose shape asks for more bytes than the tensor has.
TEST(Loader, ATensorWithTooFewBytesIsNamed) {
  const TempDir dir;
  Tensors().write(dir.path());
  const std::string path = dir.path() + "/model.safetensors";
  std::string bytes;
  {
    std::ifstream in(path, std::ios::binary);
    bytes = {std::istreambuf_iterator<char>(in), {}};
  }
  const std::size_t entry = bytes.find('"' + kNorm + '"');
  ASSERT_NE(entry, std::string::npos);
  const std::size_t shape = bytes.find("[128]", entry);
  ASSERT_LT(shape, bytes.find('}', entry));
  bytes.replace(shape, 5, "[129]");
  std::ofstream(path, std::ios::binary) << bytes;
  EXPECT_THAT(Tensors::message_of(dir.path()),
              AllOf(HasSubstr(kNorm), HasSubstr("expected 516 bytes"), HasSubstr("found 512")));
}

}  // namespace
}  // namespace tandem::test
