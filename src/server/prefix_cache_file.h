// prefix_cache_file.h — the prefix cache between two lives of a server: one file in a folder,
// written when the engine's thread ends and read when it begins (docs/prefix_cache.md, "Across a
// restart"). The engine gives and takes bytes; what they are called on the disk is decided here.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "engine/engine.h"

namespace tandem::server {

struct PrefixCacheFileOptions {
  std::string dir;  // empty: nothing is kept
  SnapshotKey key;  // what decides about the cached bits: weights, device, program
  /// For people: what is going on, and how many of how many bytes are done. Called on the engine's
  /// thread, the last time with all of them.
  std::function<void(std::string_view label, std::int64_t done, std::int64_t total)> progress = {};
};

class PrefixCacheFile {
 public:
  /// Makes the folder, only for its owner to read, if it is not there, and holds it for itself.
  /// Errors: throws Error naming the folder, also when another server has it.
  explicit PrefixCacheFile(PrefixCacheFileOptions options);
  PrefixCacheFile(const PrefixCacheFile&) = delete;
  PrefixCacheFile& operator=(const PrefixCacheFile&) = delete;
  ~PrefixCacheFile();

  /// Into an engine that had no request yet. A file that does not fit gives one warning
  /// that names it and the reason, and nothing else. Errors: throws what the device throws.
  void load(Engine& engine) const;
  /// Replaces the file by what the engine has now, as a whole or, with a warning, not at all.
  void save(Engine& engine) const;
  /// The key's weights are not the engine's any more: nothing is saved from here on.
  void on_weights_changed() { weights_changed_ = true; }

 private:
  void report(std::string_view label, std::int64_t done, std::int64_t total) const;

  PrefixCacheFileOptions options_;
  std::string path_;
  int lock_ = -1;  // descriptor of the folder's lock file
  bool weights_changed_ = false;
};

}  // namespace tandem::server
