// toml_config.h — fills a config struct (config.h) from a TOML file and command-line flags,
// remembers where each value came from, and prints the result as TOML. Knows fields, not what they
// mean.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "train/config.h"

namespace tandem {

enum class OriginKind { kDefault, kFile, kFlag, kDerived };

/// Where a value came from; `where` is "file:line" or the flag as typed.
struct Origin {
  OriginKind kind = OriginKind::kDefault;
  std::string where;
};

/// By "table.key"; a missing entry means the default.
using Origins = std::map<std::string, Origin, std::less<>>;

/// `path` may be empty (defaults and flags only). `flags` are command-line words, later ones win:
/// `--set table.key=value`, `--dashed-key value`, `--dashed-key=value`, `--bool-key`,
/// `--no-bool-key`,
/// `--disable-bool-key`. The file is applied first.
struct ConfigSources {
  std::string path;
  std::vector<std::string> flags;
};

/// Writes the sources' values through `fields`.
/// Errors: every problem, one a line: unknown table or key with the nearest known one, wrong type
/// or choice with the expected one, each with file:line or the flag.
[[nodiscard]] Expected<Origins> apply_sources(std::span<const Field> fields,
                                              const ConfigSources& sources);

/// The whole config as TOML that apply_sources() reads back, each line with the value's origin as a
/// comment.
[[nodiscard]] std::string print_resolved(std::span<const Field> fields, const Origins& origins);

/// Help: every key with type, default (the fields' current value), choices and meaning.
[[nodiscard]] std::string describe_fields(std::span<const Field> fields);

/// One message out of many.
[[nodiscard]] Failure join_problems(std::string_view title, std::span<const std::string> problems);

/// A config, complete and valid, with the origin of each value.
template <typename Config>
struct Resolved {
  Config config;
  Origins origins;

  [[nodiscard]] std::string text() const {
    Config copy = config;
    return print_resolved(fields_of(copy), origins);
  }
};

/// Defaults, then file, then flags, then derived values; all problems at once.
template <typename Config>
[[nodiscard]] Expected<Resolved<Config>> load_config(const ConfigSources& sources) {
  Resolved<Config> resolved;
  auto origins = apply_sources(fields_of(resolved.config), sources);
  if (!origins) {
    return origins.failure();
  }
  resolved.origins = *std::move(origins);
  for (const std::string& name : resolved.config.derive()) {
    resolved.origins[name] = {OriginKind::kDerived, "derived"};
  }
  const std::vector<std::string> problems = resolved.config.validate();
  if (!problems.empty()) {
    return join_problems(sources.path.empty() ? "config" : sources.path, problems);
  }
  return resolved;
}

}  // namespace tandem
