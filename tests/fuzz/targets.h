// targets.h — what the fuzzers run on one input. Separate from the fuzzers so that the unit suite
// replays seeds and past crashes through the same code, without libFuzzer. A broken property aborts
// through TDM_CHECK.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/checked_cast.h"
#include "io/checkpoint.h"
#include "io/jsonl.h"
#include "io/safetensors.h"

namespace tandem::fuzz {

/// What parses is sound (sorted, sized, inside the image) and survives a rewrite by our own writer.
inline void check_safetensors(std::string_view image) {
  const auto bytes = std::as_bytes(std::span(image));
  const auto contents = parse_safetensors("fuzz", bytes);
  if (!contents.ok()) {
    TDM_CHECK(contents.message().starts_with("fuzz: "), contents.message());
    return;
  }
  std::vector<TensorSpec> specs;
  std::size_t total = 0;
  for (const TensorInfo& info : contents->tensors) {
    TDM_CHECK(specs.empty() || specs.back().name < info.name, info.name);
    TDM_CHECK(isize(info.bytes) == info.size_bytes(), info.name);
    TDM_CHECK(info.bytes.data() >= bytes.data() &&
              info.bytes.data() + info.bytes.size() <= bytes.data() + bytes.size());
    total += info.bytes.size();
    specs.push_back(info);
  }
  TDM_CHECK(total <= bytes.size(), total);
  const SafetensorsLayout layout = plan_safetensors(specs, contents->metadata);
  TDM_CHECK(layout.data_bytes == checked_cast<std::int64_t>(total), layout.data_bytes, total);
  std::string copy = layout.header;
  copy.resize(layout.header.size() + total);
  for (const TensorInfo& info : contents->tensors) {
    if (!info.bytes.empty()) {
      std::memcpy(copy.data() + isize(layout.header) + layout.offsets.at(info.name),
                  info.bytes.data(), info.bytes.size());
    }
  }
  const auto again = parse_safetensors("copy", std::as_bytes(std::span(copy)));
  TDM_CHECK(again.ok(), again.ok() ? "" : again.message());
  TDM_CHECK(again->metadata == contents->metadata && again->tensors.size() == specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) {
    TDM_CHECK(specs[i] == again->tensors[i] &&
                  std::ranges::equal(again->tensors[i].bytes, contents->tensors[i].bytes),
              specs[i].name);
  }
}

/// First byte: 0 = the rest is a whole file; n = the rest is a header, with an honest length and
/// 8*n bytes of data.
inline void run_safetensors(std::string_view input) {
  if (input.empty()) {
    return;
  }
  const auto mode = static_cast<unsigned char>(input[0]);
  input.remove_prefix(1);
  if (mode == 0) {
    check_safetensors(input);
    return;
  }
  const std::uint64_t length = input.size();
  std::string image(sizeof(length), '\0');
  std::memcpy(image.data(), &length, sizeof(length));
  image.append(input).append(std::size_t{8} * mode, 'x');
  check_safetensors(image);
}

/// What parses names shards of the same folder only.
inline void run_checkpoint_index(std::string_view input) {
  const auto index = parse_checkpoint_index("fuzz", input);
  if (!index.ok()) {
    TDM_CHECK(index.message().starts_with("fuzz: "), index.message());
    return;
  }
  for (const auto& [tensor, shard] : index->weight_map) {
    TDM_CHECK(shard.find('/') == shard.npos && shard.find('\0') == shard.npos, shard);
    TDM_CHECK(!shard.starts_with('.') && shard.ends_with(".safetensors"), shard);
  }
}

/// Records come in order of lines, and a line can be parsed on its own with the same result.
inline void run_jsonl(std::string_view input) {
  const JsonlKeys keys{.input_key = "q", .label_key = "a"};
  const auto records = parse_jsonl("fuzz", input, keys);
  if (!records.ok()) {
    TDM_CHECK(records.message().starts_with("fuzz:"), records.message());
    return;
  }
  std::vector<std::string_view> lines;
  for (std::size_t begin = 0; begin <= input.size();) {
    const std::size_t end = std::min(input.find('\n', begin), input.size());
    lines.push_back(input.substr(begin, end - begin));
    begin = end + 1;
  }
  std::int64_t previous = 0;
  for (const PromptRecord& record : *records) {
    TDM_CHECK(record.line > previous && record.line <= isize(lines), record.line);
    previous = record.line;
    const auto alone = parse_jsonl("line", lines[usize(record.line - 1)], keys);
    TDM_CHECK(alone.ok() && alone->size() == 1, record.line);
    TDM_CHECK(alone->front().prompt == record.prompt && alone->front().label == record.label);
  }
}

struct Target {
  std::string_view name;
  void (*run)(std::string_view input);
};
/// The folder of seeds and of past crashes has the target's name.
inline constexpr Target kIoTargets[] = {{"safetensors", run_safetensors},
                                        {"checkpoint_index", run_checkpoint_index},
                                        {"jsonl", run_jsonl}};

}  // namespace tandem::fuzz
