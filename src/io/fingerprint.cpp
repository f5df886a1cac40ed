#include "io/fingerprint.h"

#include <algorithm>

#include "core/hash.h"
#include "core/mmap_file.h"

namespace tandem {
namespace {

std::uint64_t hash_samples(std::span<const std::byte> bytes, std::uint64_t seed) {
  const std::size_t sample = usize(kFingerprintSample);
  if (bytes.size() <= sample) {
    return hash_bytes(bytes, seed);
  }
  for (std::size_t at = 0; at < bytes.size() - sample; at += usize(kFingerprintStride)) {
    seed = hash_bytes(bytes.subspan(at, sample), seed);
  }
  return hash_bytes(bytes.last(sample), seed);
}

std::uint64_t hash_of(const Checkpoint& checkpoint, std::int64_t hash_all) {
  const std::vector<std::string> names = checkpoint.names();
  std::int64_t total = 0;
  for (const std::string& name : names) {
    total += checkpoint.find(name)->size_bytes();
  }
  std::uint64_t hash = 0;
  for (const std::string& name : names) {
    const TensorInfo& tensor = *checkpoint.find(name);
    const std::string head =
        fmt::format("{} {} {}", name, dtype_name(tensor.dtype), shape_text(tensor.shape));
    hash = hash_bytes(std::as_bytes(std::span(head)), hash);
    hash = total <= hash_all ? hash_bytes(tensor.bytes, hash) : hash_samples(tensor.bytes, hash);
  }
  return hash;
}

}  // namespace

std::string fingerprint(const Checkpoint& checkpoint, std::int64_t hash_all) {
  return fmt::format("{:016x}", hash_of(checkpoint, hash_all));
}

Expected<std::string> model_fingerprint(const std::string& dir) {
  const Expected<MmapFile> config = MmapFile::open(dir + "/config.json");
  if (!config) {
    return config.failure();
  }
  const Expected<Checkpoint> checkpoint = Checkpoint::open(dir);
  if (!checkpoint) {
    return checkpoint.failure();
  }
  return fmt::format("{:016x}", hash_bytes(config->bytes(), hash_of(*checkpoint, kFingerprintAll)));
}

}  // namespace tandem
