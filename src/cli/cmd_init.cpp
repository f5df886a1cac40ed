// tandem init — a checkpoint folder with seeded weights.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "cli/common.h"
#include "core/checked_cast.h"
#include "models/kimi_k3/init.h"
#include "text/char_tokenizer.h"

namespace tandem::cli {
namespace {

namespace fs = std::filesystem;
using kimi_k3::ExpertFormat;
using kimi_k3::Preset;

struct InitFlags {
  std::string preset;
  std::string dir;
  std::uint64_t seed = 1;
  std::string dtype;
  std::string experts;
  bool fp8_attention = false;
  std::int64_t vocab_size = 0;  // 0: the tokenizer's, or the preset's
  std::string tokenizer;
};

std::string preset_list() {
  std::string out = "Presets:\n";
  for (const Preset& preset : kimi_k3::presets()) {
    out += fmt::format("  {:<10} {}\n", preset.name, preset.description);
  }
  return out;
}

std::string preset_names() {
  std::vector<std::string_view> names;
  for (const Preset& preset : kimi_k3::presets()) {
    names.push_back(preset.name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

kimi_k3::InitOptions init_options(const Preset& preset, const InitFlags& flags) {
  kimi_k3::InitOptions options = preset.defaults;
  options.seed = flags.seed;
  options.fp8_attention = options.fp8_attention || flags.fp8_attention;
  if (!flags.dtype.empty()) {
    options.bf16 = flags.dtype == "bf16";
  }
  if (!flags.experts.empty()) {
    options.experts = flags.experts == "mxfp4"   ? ExpertFormat::kMxFp4
                      : flags.experts == "nvfp4" ? ExpertFormat::kNvFp4
                                                 : ExpertFormat::kPlain;
  }
  return options;
}

/// Vocabulary size and special ids of `config` as the tokenizer has them.
Status fit_to_tokenizer(kimi_k3::Config& config, const CharTokenizer& tokenizer,
                        const InitFlags& flags) {
  if (flags.vocab_size != 0 && flags.vocab_size < tokenizer.vocab_size()) {
    return fail("--vocab-size {}: expected at least {}, the number of tokens in {}",
                flags.vocab_size, tokenizer.vocab_size(), flags.tokenizer);
  }
  if (tokenizer.stop_ids().empty()) {
    return fail("{}: field \"stop\": expected at least one token that ends a response",
                flags.tokenizer);
  }
  config.vocab_size = std::max(flags.vocab_size, tokenizer.vocab_size());
  config.eos_token_id = tokenizer.stop_ids().front();
  config.pad_token_id = tokenizer.special_id("<pad>").value_or(tokenizer.stop_ids().front());
  return Ok{};
}

/// Nothing that somebody may want to keep is overwritten.
Status require_free(const std::string& dir) {
  for (const char* name : {"config.json", "model.safetensors", "model.safetensors.index.json"}) {
    std::error_code ignored;
    if (fs::exists(fs::path(dir) / name, ignored)) {
      return fail("{}: already holds a checkpoint ({}); expected a new folder", dir, name);
    }
  }
  return Ok{};
}

Expected<ExitCode> run_init(const InitFlags& flags) {
  std::optional<Preset> preset = kimi_k3::find_preset(flags.preset);
  if (!preset) {
    return fail("unknown preset '{}', expected one of {}", flags.preset, preset_names());
  }
  if (Status free = require_free(flags.dir); !free) {
    return free.failure();
  }
  std::unique_ptr<CharTokenizer> tokenizer;
  if (!flags.tokenizer.empty()) {
    auto loaded = CharTokenizer::load(flags.tokenizer);
    if (!loaded) {
      return loaded.failure();
    }
    tokenizer = *std::move(loaded);
    if (Status fit = fit_to_tokenizer(preset->config, *tokenizer, flags); !fit) {
      return fit.failure();
    }
  } else if (flags.vocab_size != 0) {
    preset->config.vocab_size = flags.vocab_size;
  }
  const auto problems = preset->config.validate();
  if (!problems.empty()) {
    return fail("preset {}: {}", flags.preset, fmt::join(problems, "; "));
  }

  constexpr std::int64_t kTicks = 1000;
  ProgressBar bar = make_progress_bar();
  bar.start("init " + flags.preset, kTicks);
  kimi_k3::write_initial_checkpoint(
      *preset, init_options(*preset, flags), flags.dir,
      [&bar](double done) { bar.update(std::llround(done * kTicks)); });
  bar.finish();
  if (tokenizer) {
    tokenizer->save((fs::path(flags.dir) / CharTokenizer::kFileName).string());
  }
  print_out("{}: {} with seed {}, {} tokens in the vocabulary{}\n", flags.dir, flags.preset,
            flags.seed, preset->config.vocab_size,
            tokenizer ? "" : "; no tokenizer (--tokenizer FILE adds one)");
  return kExitOk;
}

}  // namespace

void add_init(CommandLine& line) {
  CLI::App* command = line.add("init", "Write a checkpoint with seeded random weights");
  auto flags = std::make_shared<InitFlags>();
  command->add_option("PRESET", flags->preset, preset_names())->required();
  command->add_option("DIR", flags->dir, "New checkpoint folder")->required();
  command->add_option("--seed", flags->seed, "Of the weights")->capture_default_str();
  command->add_option("--dtype", flags->dtype, "Of unquantised matrices; default: the preset's")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command
      ->add_option("--experts", flags->experts, "Format of routed experts; default: the preset's")
      ->check(CLI::IsMember({"plain", "mxfp4", "nvfp4"}));
  command->add_flag("--fp8-attention", flags->fp8_attention, "Attention projections in block FP8");
  command
      ->add_option("--vocab-size", flags->vocab_size, "Default: the tokenizer's, or the preset's")
      ->check(CLI::PositiveNumber);
  command->add_option("--tokenizer", flags->tokenizer,
                      "Character tokenizer file to copy into DIR (demo-data writes one)");
  command->footer(preset_list());
  command->callback([&line, flags] { line.action = [flags] { return run_init(*flags); }; });
}

}  // namespace tandem::cli
