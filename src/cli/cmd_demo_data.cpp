// tandem demo-data — the demo's word problems as GSM8K-style jsonl files, and their tokenizer.
#include "cli/common.h"
#include "rl/word_problems.h"

namespace tandem::cli {
namespace {

struct DemoDataFlags {
  std::string dir;
  DemoDataOptions options;
};

Expected<ExitCode> run_demo_data(const DemoDataFlags& flags) {
  write_demo_data(flags.dir, flags.options);
  const DemonstrationOptions& demonstrations = flags.options.demonstrations;
  print_out(
      "{0}/train.jsonl: {1} problems\n"
      "{0}/test.jsonl: {2} held-out problems\n"
      "{0}/sft.jsonl: {3} batches of {4} demonstrations, {5:.0f}% careful\n"
      "{0}/tokenizer.json: their tokenizer\n",
      flags.dir, flags.options.num_train, flags.options.num_test, demonstrations.num_batches,
      demonstrations.batch_size, 100 * demonstrations.careful_share);
  return kExitOk;
}

}  // namespace

void add_demo_data(CommandLine& line) {
  CLI::App* command = line.add("demo-data", "Write the demo's arithmetic word problems");
  auto flags = std::make_shared<DemoDataFlags>();
  DemoDataOptions& options = flags->options;
  options.demonstrations.num_batches = 900;  // as many as examples/demo_sft.toml takes
  // The most distinct problems that can be drawn in reasonable time.
  const CLI::Range count(1, 100000);
  command->add_option("DIR", flags->dir, "Folder to write into")->required();
  command->add_option("--seed", options.seed, "Of all files")->capture_default_str();
  command->add_option("--num-train", options.num_train, "Problems in train.jsonl")
      ->check(count)
      ->capture_default_str();
  command->add_option("--num-test", options.num_test, "Held-out problems in test.jsonl")
      ->check(CLI::Range(1, 20000))
      ->capture_default_str();
  command
      ->add_option("--num-batches", options.demonstrations.num_batches,
                   "Batches of 64 demonstrations in sft.jsonl")
      ->check(count)
      ->capture_default_str();
  command
      ->add_option("--careful-share", options.demonstrations.careful_share,
                   "Share of demonstrations that write the steps first")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->callback([&line, flags] { line.action = [flags] { return run_demo_data(*flags); }; });
}

}  // namespace tandem::cli
