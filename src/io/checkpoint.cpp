#include "io/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "io/json_strict.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using detail::show_text;
using nlohmann::json;

/// index > weight_map, with room for whatever tools put under "metadata".
constexpr int kMaxIndexDepth = 16;
constexpr std::string_view kSuffix = ".safetensors";

bool is_shard_name(std::string_view name) {
  const auto is_plain = [](char c) {
    return static_cast<unsigned char>(c) >= 0x20 && c != '/' && c != '\\' && c != 0x7F;
  };
  return name.size() > kSuffix.size() && name.ends_with(kSuffix) && !name.starts_with('.') &&
         std::ranges::all_of(name, is_plain);
}

Expected<CheckpointIndex> parse_index(std::string_view text) {
  const auto document = detail::parse_json_strict(text, kMaxIndexDepth);
  if (!document) {
    return document.failure();
  }
  if (!document->is_object()) {
    return fail("expected a JSON object");
  }
  for (const auto& [key, value] : document->items()) {
    if (key != "metadata" && key != "weight_map") {
      return fail("unknown key {}", show_text(key));
    }
  }
  const auto weight_map = document->find("weight_map");
  if (weight_map == document->end() || !weight_map->is_object()) {
    return fail("weight_map: expected an object of strings");
  }
  CheckpointIndex index;
  for (const auto& [tensor, shard] : weight_map->items()) {
    if (!shard.is_string()) {
      return fail("weight_map: tensor {}: expected the file name of a shard", show_text(tensor));
    }
    const auto& name = shard.get_ref<const std::string&>();
    if (!is_shard_name(name)) {
      return fail("weight_map: tensor {}: expected a file name *{} in the same folder, found {}",
                  show_text(tensor), kSuffix, show_text(name));
    }
    index.weight_map.emplace(tensor, name);
  }
  return index;
}

std::string join(const std::string& dir, const std::string& name) {
  return (fs::path(dir) / name).string();
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string dtype_list(std::initializer_list<DType> dtypes) {
  std::vector<std::string_view> names;
  for (const DType dtype : dtypes) {
    names.push_back(dtype_name(dtype));
  }
  return fmt::format("{}", fmt::join(names, " or "));
}

std::string shard_file_name(const std::string& stem, std::size_t number, std::size_t count) {
  return fmt::format("{}-{:05}-of-{:05}{}", stem, number, count, kSuffix);
}

using Group = std::vector<const TensorInfo*>;

/// Fills shards in order of names.
std::vector<Group> split_into_shards(std::span<const TensorInfo> tensors, std::int64_t max_bytes) {
  Group order;
  for (const TensorInfo& tensor : tensors) {
    TDM_CHECK(isize(tensor.bytes) == tensor.size_bytes(), tensor.name, tensor.bytes.size());
    order.push_back(&tensor);
  }
  std::ranges::sort(order, {}, [](const TensorInfo* t) -> const std::string& { return t->name; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    TDM_CHECK(order[i - 1]->name != order[i]->name, "two tensors of one name", order[i]->name);
  }
  std::vector<Group> shards(1);
  std::int64_t filled = 0;
  for (const TensorInfo* tensor : order) {
    if (!shards.back().empty() && filled > max_bytes - isize(tensor->bytes)) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(tensor);
    filled += isize(tensor->bytes);
  }
  return shards;
}

void write_shard(const std::string& path, const Group& tensors, const Metadata& metadata) {
  std::vector<TensorSpec> specs;
  for (const TensorInfo* tensor : tensors) {
    specs.push_back(*tensor);
  }
  SafetensorsWriter writer(path, std::move(specs), metadata);
  for (const TensorInfo* tensor : tensors) {
    writer.write(tensor->name, tensor->bytes);
  }
  writer.finish();
}

void prepare_folder(const std::string& dir, const std::string& stem) {
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) {
    throw_error("{}: cannot create the folder: {}", dir, error.message());
  }
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    const std::string name = entry.path().filename().string();
    // A leftover shard beside a new index would be a checkpoint that mixes two.
    if (name == stem + std::string(kSuffix) ||
        name == stem + std::string(kSuffix) + ".index.json" ||
        (name.starts_with(stem + "-") && name.ends_with(kSuffix))) {
      throw_error("{}: already holds a checkpoint ({}); expected a fresh folder", dir, name);
    }
  }
  if (error) {
    throw_error("{}: cannot list the folder: {}", dir, error.message());
  }
}

}  // namespace

Expected<CheckpointIndex> parse_checkpoint_index(std::string_view label, std::string_view text) {
  auto index = parse_index(text);
  if (!index) {
    return fail("{}: {}", label, index.message());
  }
  return index;
}

Status Checkpoint::add_shard(const std::string& file_name) {
  auto file = SafetensorsFile::open(join(dir_, file_name));
  if (!file) {
    return fail("checkpoint {}: {}", dir_, file.message());
  }
  const std::size_t shard = shards_.size();
  shards_.push_back(*std::move(file));
  shard_names_.push_back(file_name);
  for (const auto& [key, value] : shards_.back().metadata()) {
    metadata_.emplace(key, value);
  }
  for (const TensorInfo& info : shards_.back().tensors()) {
    const auto [entry, is_new] =
        tensors_.emplace(info.name, Entry{.info = &info, .shard = shard, .used = false});
    if (!is_new) {
      return fail("checkpoint {}: tensor {}: in two shards, {} and {}", dir_, info.name,
                  shard_names_[entry->second.shard], file_name);
    }
  }
  return Ok{};
}

Checkpoint Checkpoint::of(std::string label, std::vector<TensorInfo> tensors) {
  Checkpoint checkpoint(std::move(label));
  checkpoint.shard_names_ = {"memory"};
  checkpoint.in_memory_ = std::move(tensors);
  for (const TensorInfo& tensor : checkpoint.in_memory_) {
    checkpoint.tensors_[tensor.name] = {&tensor, 0, false};
  }
  return checkpoint;
}

Expected<Checkpoint> Checkpoint::open(const std::string& dir, const std::string& stem) {
  const std::string single = stem + std::string(kSuffix);
  const std::string index_name = single + ".index.json";
  const bool has_single = exists(join(dir, single));
  const bool has_index = exists(join(dir, index_name));
  if (has_single == has_index) {
    return fail("checkpoint {}: expected {} or {}, found {}", dir, single, index_name,
                has_single ? "both" : "neither");
  }
  Checkpoint checkpoint(dir);
  if (has_single) {
    if (const Status status = checkpoint.add_shard(single); !status) {
      return status.failure();
    }
    return checkpoint;
  }
  const auto map = MmapFile::open(join(dir, index_name));
  if (!map) {
    return fail("checkpoint {}: {}", dir, map.message());
  }
  const std::string_view text(reinterpret_cast<const char*>(map->bytes().data()),
                              map->bytes().size());
  const auto index = parse_checkpoint_index(map->path(), text);
  if (!index) {
    return fail("checkpoint {}: {}", dir, index.message());
  }
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : index->weight_map) {
    shards.insert(shard);
  }
  for (const std::string& shard : shards) {
    if (const Status status = checkpoint.add_shard(shard); !status) {
      return status.failure();
    }
  }
  for (const auto& [tensor, shard] : index->weight_map) {
    const auto entry = checkpoint.tensors_.find(tensor);
    if (entry == checkpoint.tensors_.end() ||
        checkpoint.shard_names_[entry->second.shard] != shard) {
      return fail("checkpoint {}: tensor {}: expected in shard {} by the index, not found there",
                  dir, tensor, shard);
    }
  }
  for (const auto& [tensor, entry] : checkpoint.tensors_) {
    if (!index->weight_map.contains(tensor)) {
      return fail("checkpoint {}: tensor {}: in shard {} but not in the index", dir, tensor,
                  checkpoint.shard_names_[entry.shard]);
    }
  }
  return checkpoint;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : tensors_) {
    names.push_back(name);
  }
  return names;
}

const TensorInfo* Checkpoint::find(std::string_view name) const {
  const auto entry = tensors_.find(name);
  return entry == tensors_.end() ? nullptr : entry->second.info;
}

Expected<TensorInfo> Checkpoint::take(std::string_view name, std::initializer_list<DType> dtypes,
                                      std::span<const std::int64_t> shape) {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    return fail("checkpoint {}: tensor {}: expected {} {}, found in no shard", dir_, name,
                dtype_list(dtypes), shape_text(shape));
  }
  Entry& entry = found->second;
  const std::string& shard = shard_names_[entry.shard];
  if (std::ranges::find(dtypes, entry.info->dtype) == dtypes.end()) {
    return fail("checkpoint {}: tensor {}: expected dtype {}, found {} in shard {}", dir_, name,
                dtype_list(dtypes), dtype_name(entry.info->dtype), shard);
  }
  if (!std::ranges::equal(shape, entry.info->shape)) {
    return fail("checkpoint {}: tensor {}: expected shape {}, found {} in shard {}", dir_, name,
                shape_text(shape), shape_text(entry.info->shape), shard);
  }
  entry.used = true;
  return *entry.info;
}

void Checkpoint::skip_prefix(std::string_view prefix) {
  for (auto entry = tensors_.lower_bound(prefix);
       entry != tensors_.end() && entry->first.starts_with(prefix); ++entry) {
    entry->second.used = true;
  }
}

std::vector<std::string> Checkpoint::unused() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : tensors_) {
    if (!entry.used) {
      names.push_back(name);
    }
  }
  return names;
}

std::vector<std::string> write_checkpoint(const std::string& dir,
                                          std::span<const TensorInfo> tensors,
                                          const WriteCheckpointOptions& options) {
  prepare_folder(dir, options.stem);
  const std::vector<Group> shards = split_into_shards(tensors, options.max_shard_bytes);
  if (shards.size() == 1) {
    const std::string name = options.stem + std::string(kSuffix);
    write_shard(join(dir, name), shards[0], options.metadata);
    return {name};
  }
  std::vector<std::string> files;
  json index = {{"metadata", json::object()}, {"weight_map", json::object()}};
  std::int64_t total_bytes = 0;
  for (const Group& shard : shards) {
    files.push_back(shard_file_name(options.stem, files.size() + 1, shards.size()));
    write_shard(join(dir, files.back()), shard, options.metadata);
    for (const TensorInfo* tensor : shard) {
      index["weight_map"][tensor->name] = files.back();
      total_bytes += isize(tensor->bytes);
    }
  }
  index["metadata"]["total_size"] = total_bytes;
  files.push_back(options.stem + std::string(kSuffix) + ".index.json");
  write_file_atomic(join(dir, files.back()), index.dump(2) + "\n");
  return files;
}

}  // namespace tandem
