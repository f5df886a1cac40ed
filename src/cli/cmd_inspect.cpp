// tandem inspect — what a checkpoint is: config, tensors, sizes, and the memory that running it
// takes.
#include <map>
#include <vector>

#include "cli/common.h"
#include "core/checked_cast.h"
#include "engine/warm_up.h"
#include "io/checkpoint.h"
#include "models/kimi_k3/config.h"
#include "models/registry.h"

namespace tandem::cli {
namespace {

struct InspectFlags {
  std::string dir;
  bool tensors = false;
  bool no_load = false;
  EngineOptions engine;
};

std::string mebibytes(std::int64_t bytes) {
  return fmt::format("{:.2f} MiB", static_cast<double>(bytes) / (1 << 20));
}

std::string show(const std::vector<std::int64_t>& values) {
  return fmt::format("[{}]", fmt::join(values, ", "));
}
template <typename T>
std::string show(const T& value) {
  return fmt::format("{}", value);
}

void print_config(kimi_k3::Config config) {
  write_out("config\n");
  const auto print = [](const char* key, const auto& value) {
    print_out("  {:<32} {}\n", key, show(value));
  };
  config.visit_fields(print);
  config.linear_attn_config.visit_fields([&print](const char* key, const auto& value) {
    print(fmt::format("linear_attn.{}", key).c_str(), value);
  });
  print("bos_token_id", config.bos_token_id);
  print("eos_token_id", config.eos_token_id);
  print("pad_token_id", config.pad_token_id);
}

void print_tensors(const Checkpoint& checkpoint, bool each) {
  struct Sum {
    std::int64_t tensors = 0;
    std::int64_t elements = 0;
    std::int64_t bytes = 0;
  };
  std::map<std::string, Sum> by_dtype;
  Sum all;
  if (each) {
    write_out("\ntensors\n");
  }
  for (const std::string& name : checkpoint.names()) {
    const TensorInfo& tensor = *checkpoint.find(name);
    if (each) {
      print_out("  {:<84} {:<8} {:<18} {:>12}\n", name, dtype_name(tensor.dtype),
                shape_text(tensor.shape), tensor.size_bytes());
    }
    for (Sum* sum : {&by_dtype[std::string(dtype_name(tensor.dtype))], &all}) {
      ++sum->tensors;
      sum->elements += tensor.numel();
      sum->bytes += tensor.size_bytes();
    }
  }
  write_out("\nstored\n");
  by_dtype["total"] = all;
  for (const auto& [dtype, sum] : by_dtype) {
    print_out("  {:<10} {:>6} tensors {:>14} elements {:>14}\n", dtype, sum.tensors, sum.elements,
              mebibytes(sum.bytes));
  }
}

Status print_loaded(const InspectFlags& flags, const GlobalOptions& global) {
  Runtime runtime(global, global.threads);
  const auto model = load_model(runtime.ctx(), flags.dir, {});
  if (!model) {
    return model.failure();
  }
  const auto plan = plan_serving(**model, runtime.ctx(), flags.engine);
  if (!plan) {
    return plan.failure();
  }
  const ModelFootprint footprint = (*model)->footprint();
  print_out(
      "\nparameters\n"
      "  total          {:>14}\n"
      "  active         {:>14}  used by one token, without the embedding table\n"
      "  read per token {:>14}  weights that one token of batch 1 reads\n",
      footprint.num_parameters, footprint.num_active_parameters,
      mebibytes(footprint.decode_read_bytes));
  print_out("\nmemory plan for {} running sequences of {} tokens\n{}",
            flags.engine.max_running_seqs, flags.engine.max_seq_len, plan->to_string());
  write_out("\nloads: every tensor of the model is there with the right shape, and no other\n");
  return Ok{};
}

Expected<ExitCode> run_inspect(const InspectFlags& flags, const GlobalOptions& global) {
  const auto config = kimi_k3::load_config(flags.dir);
  if (!config) {
    return config.failure();
  }
  const auto checkpoint = Checkpoint::open(flags.dir);
  if (!checkpoint) {
    return checkpoint.failure();
  }
  print_config(*config);
  print_tensors(*checkpoint, flags.tensors);
  if (!flags.no_load) {
    if (Status loaded = print_loaded(flags, global); !loaded) {
      return loaded.failure();
    }
  }
  return kExitOk;
}

}  // namespace

void add_inspect(CommandLine& line) {
  CLI::App* command =
      line.add("inspect", "Show a checkpoint's config, tensors, sizes and memory plan");
  auto flags = std::make_shared<InspectFlags>();
  command->add_option("DIR", flags->dir, "Checkpoint folder")->required();
  command->add_flag("--tensors", flags->tensors, "List every tensor: name, dtype, shape, bytes");
  command->add_flag("--no-load", flags->no_load,
                    "Read headers only: no validation, parameter counts or memory plan");
  command
      ->add_option("--max-running-seqs", flags->engine.max_running_seqs,
                   "Memory plan: sequences that run at once")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--max-seq-len", flags->engine.max_seq_len,
                   "Memory plan: tokens of the longest sequence")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--page-size", flags->engine.page_size, "Memory plan: tokens in a cache page")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_kv_cache_dtype(*command, flags->engine.kv_cache_dtype);
  command->callback([&line, flags] {
    line.action = [flags, &line] { return run_inspect(*flags, line.global); };
  });
}

}  // namespace tandem::cli
