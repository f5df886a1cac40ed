#include "train/train_checkpoint.h"

#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <nlohmann/json.hpp>

#include "io/atomic_file.h"
#include "io/checkpoint.h"
#include "io/host_tensors.h"

namespace tandem {
namespace fs = std::filesystem;
namespace {

/// Files of a model folder that are not tensors.
bool is_side_file(const std::string& name) {
  return name == "config.json" || name == "char_tokenizer.json" || name == "tiktoken.model" ||
         name == "tokenizer_config.json" || name == "generation_config.json";
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string make_dir(const std::string& dir) {
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) {
    throw_error("{}: cannot create the folder: {}", dir, error.message());
  }
  return dir;
}

template <typename State, typename Visitor>
void visit_counts(State& state, Visitor&& visit) {
  visit("step", state.step);
  visit("optimizer_steps", state.optimizer_steps);
  visit("skipped_steps", state.skipped_steps);
  visit("weight_version", state.weight_version);
  visit("data_offset", state.data_offset);
}

Expected<TrainState> parse_state(const std::string& path) {
  const auto json = nlohmann::json::parse(read_file(path), nullptr, false);
  if (!json.is_object()) {
    return fail("{}: missing or not a JSON object", path);
  }
  TrainState state;
  std::string problem;
  visit_counts(state, [&](const char* key, std::int64_t& field) {
    const auto found = json.find(key);
    if (found == json.end() || !found->is_number_integer()) {
      problem = fmt::format("{}: field \"{}\": expected an integer", path, key);
    } else {
      field = found->get<std::int64_t>();
    }
  });
  const auto fingerprint = json.find("run_fingerprint");
  if (fingerprint == json.end() || !fingerprint->is_string()) {
    problem = fmt::format("{}: field \"run_fingerprint\": expected a string", path);
  }
  if (!problem.empty()) {
    return Failure{problem};
  }
  state.run_fingerprint = fingerprint->get<std::string>();
  return state;
}

/// step_0000010 -> 10.
std::optional<std::int64_t> step_of(const std::string& name) {
  constexpr std::string_view kPrefix = "step_";
  std::int64_t step = 0;
  if (!name.starts_with(kPrefix) ||
      std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step).ptr !=
          name.data() + name.size()) {
    return std::nullopt;
  }
  return step;
}

}  // namespace

void export_model(const std::string& dir, const nn::ParameterStore& parameters,
                  const std::string& source_dir) {
  make_dir(dir);
  HostTensors tensors;
  for (const nn::Parameter& parameter : parameters.all()) {
    tensors.add({parameter.name, DType::kF32, parameter.shape}, parameter.value_storage);
  }
  write_checkpoint(dir, tensors.infos(), {.metadata = {{"format", "pt"}}});
  for (const auto& entry : fs::directory_iterator(source_dir)) {
    const std::string name = entry.path().filename();
    if (is_side_file(name)) {
      write_file_atomic(dir + "/" + name, read_file(entry.path()));
    }
  }
}

std::string CheckpointFolder::step_dir(std::int64_t step) const {
  return fmt::format("{}/step_{:07}", dir_, step);
}

void CheckpointFolder::write(const TrainState& state, const nn::ParameterStore& parameters,
                             const Optimizer& optimizer, const std::string& source_dir) const {
  const std::string dir = step_dir(state.step);
  fs::remove_all(dir);  // a save that a crash left behind
  export_model(dir, parameters, source_dir);
  const HostTensors moments = optimizer.state();
  write_checkpoint(dir, moments.infos(), {.stem = "optimizer", .metadata = {}});
  nlohmann::ordered_json json;
  visit_counts(state, [&](const char* key, std::int64_t field) { json[key] = field; });
  json["run_fingerprint"] = state.run_fingerprint;
  write_file_atomic(dir + "/state.json", json.dump(2) + "\n");
}

void CheckpointFolder::publish(std::int64_t step) const {
  write_file_atomic(dir_ + "/latest", fs::path(step_dir(step)).filename().string() + "\n");
  std::vector<std::int64_t> older;
  for (const auto& entry : fs::directory_iterator(dir_)) {
    const auto found = step_of(entry.path().filename());
    if (found && *found < step && !(retain_interval_ && *found % *retain_interval_ == 0)) {
      older.push_back(*found);
    }
  }
  std::ranges::sort(older);
  for (std::size_t i = 0; i + 1 < older.size(); ++i) {
    fs::remove_all(step_dir(older[i]));
  }
}

std::optional<std::string> CheckpointFolder::latest() const {
  std::string name = read_file(dir_ + "/latest");
  while (!name.empty() && name.back() == '\n') {
    name.pop_back();
  }
  return step_of(name) ? std::optional(dir_ + "/" + name) : std::nullopt;
}

Expected<TrainState> CheckpointFolder::restore(const std::string& step_dir,
                                               nn::ParameterStore& parameters,
                                               Optimizer& optimizer) {
  auto state = parse_state(step_dir + "/state.json");
  if (!state.ok()) {
    return state;
  }
  auto weights = Checkpoint::open(step_dir);
  if (!weights.ok()) {
    return weights.failure();
  }
  const auto moments = SafetensorsFile::open(step_dir + "/optimizer.safetensors");
  if (!moments.ok()) {
    return moments.failure();
  }
  for (nn::Parameter& parameter : parameters.all()) {
    const auto tensor = weights->take(parameter.name, DType::kF32, parameter.shape);
    if (!tensor.ok()) {
      return tensor.failure();
    }
    parameter.value_storage.assign(tensor->bytes);
  }
  if (const Status status =
          optimizer.restore(*moments, state->optimizer_steps, state->skipped_steps);
      !status.ok()) {
    return status.failure();
  }
  return state;
}

}  // namespace tandem
