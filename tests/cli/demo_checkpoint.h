// demo_checkpoint.h — a small checkpoint with a tokenizer, made once by the program itself.
#pragma once

#include <stdexcept>
#include <string>

#include "cli/cli_support.h"

namespace tandem::test {

/// data/ (word problems and their tokenizer) and model/ (`preset` with random weights).
class DemoFiles {
 public:
  explicit DemoFiles(const std::string& preset, const std::vector<std::string>& init_flags = {}) {
    require(run_tandem(
        {"demo-data", data(), "--num-train", "40", "--num-test", "8", "--num-batches", "4"}));
    std::vector<std::string> args{"init", preset, model(), "--tokenizer",
                                  data() + "/tokenizer.json"};
    args.insert(args.end(), init_flags.begin(), init_flags.end());
    require(run_tandem(args));
  }
  [[nodiscard]] std::string data() const { return file("data"); }
  [[nodiscard]] std::string model() const { return file("model"); }
  [[nodiscard]] std::string file(const std::string& name) const { return dir_.path() + "/" + name; }

 private:
  static void require(const Outcome& outcome) {
    if (outcome.exit_code != 0) {
      throw std::runtime_error("preparing a checkpoint failed: " + outcome.err);
    }
  }
  TempDir dir_;
};

}  // namespace tandem::test
