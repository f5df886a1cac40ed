// fingerprint.h — a short text that two checkpoints share only if their weights are the same, for
// files that are of use with one set of weights only.
#pragma once

#include <cstdint>
#include <string>

#include "io/checkpoint.h"

namespace tandem {

/// Up to so many bytes of tensors all are hashed; of larger checkpoints samples of each tensor.
inline constexpr std::int64_t kFingerprintAll = std::int64_t{1} << 30;
/// A sample begins every so many bytes of a tensor, and one ends it. All of it if it is smaller.
inline constexpr std::int64_t kFingerprintStride = std::int64_t{1} << 22;
inline constexpr std::int64_t kFingerprintSample = 4096;

/// Hash of every tensor's name, type, shape and content (in part, if there are more than
/// `hash_all` bytes), 16 hexadecimal digits. Not of how they are cut into files, nor of times.
[[nodiscard]] std::string fingerprint(const Checkpoint& checkpoint,
                                      std::int64_t hash_all = kFingerprintAll);

/// Of `dir`/config.json and the weights beside it. Errors: a Failure naming what cannot be read.
[[nodiscard]] Expected<std::string> model_fingerprint(const std::string& dir);

}  // namespace tandem
