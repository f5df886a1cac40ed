#include "io/safetensors.h"

#include <algorithm>
#include <bit>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "io/json_strict.h"

namespace tandem {
namespace {

using detail::show_text;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::size_t kLengthBytes = 8;
/// The reference implementation's cap; the largest known header (5,000 tensors a shard) is below 1
/// MB.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
/// header > tensor > shape
constexpr int kMaxDepth = 3;
constexpr const char* kMetadataKey = "__metadata__";

/// Bytes of a tensor; nullopt when they do not fit in int64. Zero extents do not hide an overflow
/// of the others, so that strides can be computed as well.
std::optional<std::int64_t> checked_bytes(std::span<const std::int64_t> shape, DType dtype) {
  std::int64_t bytes = dtype_size(dtype);
  bool empty = false;
  for (const std::int64_t extent : shape) {
    empty = empty || extent == 0;
    if (__builtin_mul_overflow(bytes, std::max(extent, std::int64_t{1}), &bytes)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bytes;
}

struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct Entry {
  TensorInfo info;
  Range range;
};

std::optional<std::uint64_t> as_count(const json& value) {
  if (!value.is_number_unsigned()) {
    return std::nullopt;
  }
  const auto count = value.get<std::uint64_t>();
  return std::in_range<std::int64_t>(count) ? std::optional(count) : std::nullopt;
}

Expected<Metadata> parse_metadata(const json& value) {
  if (!value.is_object()) {
    return fail("{}: expected an object of strings", kMetadataKey);
  }
  Metadata metadata;
  for (const auto& [key, entry] : value.items()) {
    if (!entry.is_string()) {
      return fail("{}: key {}: expected a string", kMetadataKey, show_text(key));
    }
    metadata.emplace(key, entry.get<std::string>());
  }
  return metadata;
}

/// Reads {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}: types only, ranges are
/// checked by the caller.
Expected<Entry> parse_entry(const std::string& name, const json& value) {
  if (!value.is_object()) {
    return fail("expected an object");
  }
  for (const auto& [key, field] : value.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      return fail("unknown key {}", show_text(key));
    }
  }
  const auto dtype = value.find("dtype");
  const auto shape = value.find("shape");
  const auto offsets = value.find("data_offsets");
  if (dtype == value.end() || shape == value.end() || offsets == value.end()) {
    return fail("expected the keys dtype, shape and data_offsets");
  }
  Entry entry;
  entry.info.name = name;
  if (!dtype->is_string()) {
    return fail("dtype: expected a string");
  }
  const auto& dtype_text = dtype->get_ref<const std::string&>();
  const auto known = dtype_from_name(dtype_text);
  if (!known) {
    return fail("dtype: unknown type {}", show_text(dtype_text));
  }
  entry.info.dtype = *known;
  if (!shape->is_array()) {
    return fail("shape: expected an array");
  }
  for (const json& extent : *shape) {
    const auto count = as_count(extent);
    if (!count) {
      return fail("shape: expected non-negative 64-bit integers, found {}",
                  show_text(extent.dump()));
    }
    entry.info.shape.push_back(checked_cast<std::int64_t>(*count));
  }
  const auto begin =
      offsets->is_array() && offsets->size() == 2 ? as_count((*offsets)[0]) : std::nullopt;
  const auto end = begin ? as_count((*offsets)[1]) : std::nullopt;
  if (!begin || !end) {
    return fail("data_offsets: expected two non-negative 64-bit integers, found {}",
                show_text(offsets->dump()));
  }
  entry.range = {*begin, *end};
  return entry;
}

/// Gives the entry its bytes if its range lies in the data and has the size that dtype and shape
/// say.
Status attach_bytes(Entry& entry, std::span<const std::byte> data) {
  const auto [begin, end] = entry.range;
  if (begin > end || end > data.size()) {
    return fail("data_offsets: expected a range within the {} bytes of data, found [{}, {}]",
                data.size(), begin, end);
  }
  const auto bytes = checked_bytes(entry.info.shape, entry.info.dtype);
  if (!bytes) {
    return fail("shape {}: size overflows 64 bits", shape_text(entry.info.shape));
  }
  if (static_cast<std::uint64_t>(*bytes) != end - begin) {
    return fail("data_offsets: expected {} bytes for {} {}, found {} ([{}, {}])", *bytes,
                dtype_name(entry.info.dtype), shape_text(entry.info.shape), end - begin, begin,
                end);
  }
  entry.info.bytes = data.subspan(begin, end - begin);
  return Ok{};
}

/// The ranges must tile the data: no byte twice, none unclaimed.
Status check_tiling(std::span<const Entry> entries, std::size_t data_bytes) {
  std::vector<const Entry*> order;
  order.reserve(entries.size());
  for (const Entry& entry : entries) {
    order.push_back(&entry);
  }
  std::ranges::sort(order, [](const Entry* a, const Entry* b) {
    return std::tie(a->range.begin, a->range.end) < std::tie(b->range.begin, b->range.end);
  });
  std::uint64_t next = 0;
  for (const Entry* entry : order) {
    if (entry->range.begin != next) {
      return fail("tensor {}: data_offsets: expected to start at {} ({}), found {}",
                  show_text(entry->info.name), next,
                  entry->range.begin < next ? "overlaps another tensor" : "gap before it",
                  entry->range.begin);
    }
    next = entry->range.end;
  }
  if (next != data_bytes) {
    return fail("expected {} bytes of data after the header, found {}", next, data_bytes);
  }
  return Ok{};
}

Expected<std::string_view> header_text(std::span<const std::byte> image) {
  if (image.size() < kLengthBytes) {
    return fail("expected a header length of 8 bytes, the file has {} bytes", image.size());
  }
  std::uint64_t length = 0;
  std::memcpy(&length, image.data(), kLengthBytes);
  if (length > kMaxHeaderBytes) {
    return fail("header length: expected at most {} bytes, found {}", kMaxHeaderBytes, length);
  }
  if (length > image.size() - kLengthBytes) {
    return fail(
        "header length: expected at most the {} bytes that follow, found {} (file truncated?)",
        image.size() - kLengthBytes, length);
  }
  const std::string_view text(reinterpret_cast<const char*>(image.data()) + kLengthBytes, length);
  if (!text.starts_with('{')) {
    return fail("header: expected a JSON object that starts at byte 8");
  }
  return text;
}

Expected<SafetensorsContents> parse_image(std::span<const std::byte> image) {
  const auto text = header_text(image);
  if (!text) {
    return text.failure();
  }
  const auto data = image.subspan(kLengthBytes + text->size());
  const auto header = detail::parse_json_strict(*text, kMaxDepth);
  if (!header) {
    return fail("header: {}", header.message());
  }
  SafetensorsContents contents;
  std::vector<Entry> entries;  // in the order of the JSON object, which the library keeps sorted
  for (const auto& [name, value] : header->items()) {
    if (name == kMetadataKey) {
      auto metadata = parse_metadata(value);
      if (!metadata) {
        return metadata.failure();
      }
      contents.metadata = *std::move(metadata);
      continue;
    }
    auto entry = parse_entry(name, value);
    if (!entry) {
      return fail("tensor {}: {}", show_text(name), entry.message());
    }
    if (const Status status = attach_bytes(*entry, data); !status) {
      return fail("tensor {}: {}", show_text(name), status.message());
    }
    entries.push_back(*std::move(entry));
  }
  if (const Status status = check_tiling(entries, data.size()); !status) {
    return status.failure();
  }
  for (Entry& entry : entries) {
    contents.tensors.push_back(std::move(entry.info));
  }
  return contents;
}

}  // namespace

std::string shape_text(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::int64_t TensorSpec::numel() const {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) {
    n *= extent;
  }
  return n;
}

Expected<SafetensorsContents> parse_safetensors(std::string_view label,
                                                std::span<const std::byte> image) {
  auto contents = parse_image(image);
  if (!contents) {
    return fail("{}: {}", label, contents.message());
  }
  return contents;
}

Expected<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  auto map = MmapFile::open(path);
  if (!map) {
    return map.failure();
  }
  auto contents = parse_safetensors(path, map->bytes());
  if (!contents) {
    return contents.failure();
  }
  return SafetensorsFile(*std::move(map), *std::move(contents));
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto& tensors = contents_.tensors;
  const auto found = std::ranges::lower_bound(tensors, name, {}, &TensorInfo::name);
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

SafetensorsLayout plan_safetensors(std::span<const TensorSpec> specs, const Metadata& metadata) {
  std::vector<const TensorSpec*> order;
  for (const TensorSpec& spec : specs) {
    TDM_CHECK(spec.name != kMetadataKey, spec.name);
    TDM_CHECK(std::ranges::all_of(spec.shape, [](std::int64_t extent) { return extent >= 0; }),
              spec.name, shape_text(spec.shape));
    order.push_back(&spec);
  }
  std::ranges::sort(order, [](const TensorSpec* a, const TensorSpec* b) {
    return std::make_tuple(-dtype_size(a->dtype), std::string_view(a->name)) <
           std::make_tuple(-dtype_size(b->dtype), std::string_view(b->name));
  });
  SafetensorsLayout layout;
  json header = json::object();
  if (!metadata.empty()) {
    header[kMetadataKey] = metadata;
  }
  for (const TensorSpec* spec : order) {
    const auto bytes = checked_bytes(spec->shape, spec->dtype);
    TDM_CHECK(bytes.has_value(), spec->name, shape_text(spec->shape));
    const bool is_new = layout.offsets.emplace(spec->name, layout.data_bytes).second;
    TDM_CHECK(is_new, "two tensors of one name", spec->name);
    header[spec->name] = {{"dtype", dtype_name(spec->dtype)},
                          {"shape", spec->shape},
                          {"data_offsets", {layout.data_bytes, layout.data_bytes + *bytes}}};
    layout.data_bytes += *bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size();
  TDM_CHECK(length <= kMaxHeaderBytes, length);
  layout.header.resize(kLengthBytes);
  std::memcpy(layout.header.data(), &length, kLengthBytes);
  layout.header += text;
  return layout;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorSpec> specs,
                                     const Metadata& metadata)
    : file_(path) {
  const SafetensorsLayout layout = plan_safetensors(specs, metadata);
  for (const TensorSpec& spec : specs) {
    const std::int64_t begin = isize(layout.header) + layout.offsets.at(spec.name);
    slots_[spec.name] = {.next = begin, .end = begin + spec.size_bytes()};
  }
  file_.write_at(0, std::as_bytes(std::span(layout.header)));
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  const auto slot = slots_.find(name);
  TDM_CHECK(slot != slots_.end(), name);
  TDM_CHECK(isize(bytes) <= slot->second.end - slot->second.next, name, bytes.size());
  file_.write_at(slot->second.next, bytes);
  slot->second.next += isize(bytes);
}

void SafetensorsWriter::finish() {
  for (const auto& [name, slot] : slots_) {
    TDM_CHECK(slot.next == slot.end, name, slot.end - slot.next, "bytes missing");
  }
  file_.commit();
}

}  // namespace tandem
