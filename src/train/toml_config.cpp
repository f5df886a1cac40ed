// toml_config.cpp — toml++ stays in here.
#include "train/toml_config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <optional>
#include <sstream>
#include <type_traits>
#include <utility>

#include <toml++/toml.h>

#include "core/check.h"

namespace tandem {
namespace {

using StringList = std::vector<std::string>;

/// The value type behind a field pointer: optional<T>* and T* both give T.
template <typename T>
struct Unwrap {
  using Type = T;
};
template <typename T>
struct Unwrap<std::optional<T>> {
  using Type = T;
};
template <typename Pointer>
using ValueOf = typename Unwrap<std::remove_pointer_t<Pointer>>::Type;

template <typename T>
constexpr std::string_view type_name() {
  if constexpr (std::is_same_v<T, bool>) {
    return "true or false";
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return "an integer";
  } else if constexpr (std::is_same_v<T, double>) {
    return "a finite number";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return "a string";
  } else {
    return "a list of strings";
  }
}

std::string_view field_type(const Field& field) {
  return std::visit([](auto* p) { return type_name<ValueOf<decltype(p)>>(); }, field.value);
}

bool is_bool(const Field& field) {
  return std::holds_alternative<bool*>(field.value);
}

std::string full_name(const Field& field) {
  return fmt::format("{}.{}", field.table, field.key);
}

/// Levenshtein distance: what "nearest known key" means.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i] == b[j] ? 0U : 1U);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substituted, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::string nearest(std::string_view wanted, const std::vector<std::string>& known) {
  TDM_CHECK(!known.empty());
  return *std::min_element(known.begin(), known.end(), [wanted](const auto& a, const auto& b) {
    return edit_distance(wanted, a) < edit_distance(wanted, b);
  });
}

std::vector<std::string> table_names(std::span<const Field> fields) {
  std::vector<std::string> names;
  for (const Field& field : fields) {
    if (names.empty() || names.back() != field.table) {
      names.emplace_back(field.table);
    }
  }
  return names;
}

std::vector<std::string> key_names(std::span<const Field> fields, std::string_view table) {
  std::vector<std::string> names;
  for (const Field& field : fields) {
    if (table.empty() || field.table == table) {
      names.emplace_back(field.key);
    }
  }
  return names;
}

/// "max_tokens_per_gpu" and friends: keys of Miles that we spell otherwise.
std::string_view renamed_key(std::string_view key) {
  return key == "max_tokens_per_gpu" ? "max_tokens_per_microbatch" : std::string_view{};
}

std::string nearest_key(std::span<const Field> fields, std::string_view table,
                        std::string_view key) {
  const std::string_view renamed = renamed_key(key);
  return renamed.empty() ? nearest(key, key_names(fields, table)) : std::string(renamed);
}

const Field* find_field(std::span<const Field> fields, std::string_view table,
                        std::string_view key) {
  const auto it = std::find_if(fields.begin(), fields.end(), [&](const Field& field) {
    return field.table == table && field.key == key;
  });
  return it == fields.end() ? nullptr : &*it;
}

template <typename T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc{} || result.ptr != end) {
    return std::nullopt;
  }
  return value;
}

/// A command-line word as T.
template <typename T>
std::optional<T> from_text(std::string_view text) {
  if constexpr (std::is_same_v<T, bool>) {
    if (text == "true" || text == "1") {
      return true;
    }
    return text == "false" || text == "0" ? std::optional(false) : std::nullopt;
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return parse_number<std::int64_t>(text);
  } else if constexpr (std::is_same_v<T, double>) {
    const auto value = parse_number<double>(text);
    return value && std::isfinite(*value) ? value : std::nullopt;
  } else if constexpr (std::is_same_v<T, std::string>) {
    return std::string(text);
  } else {
    StringList list;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t comma = std::min(text.find(',', begin), text.size());
      list.emplace_back(text.substr(begin, comma - begin));
      begin = comma + 1;
    }
    return list;
  }
}

/// A TOML node as T. Integers are accepted where a number is wanted, nothing else is converted.
template <typename T>
std::optional<T> from_node(const toml::node& node) {
  if constexpr (std::is_same_v<T, StringList>) {
    const toml::array* array = node.as_array();
    if (array == nullptr) {
      return std::nullopt;
    }
    StringList list;
    for (const toml::node& element : *array) {
      const auto text = element.value_exact<std::string>();
      if (!text) {
        return std::nullopt;
      }
      list.push_back(*text);
    }
    return list;
  } else if constexpr (std::is_same_v<T, double>) {
    const auto value = node.is_number() ? node.value<double>() : std::nullopt;
    return value && std::isfinite(*value) ? value : std::nullopt;
  } else {
    return node.value_exact<T>();
  }
}

bool is_allowed(const Field& field, const std::string& value) {
  return field.choices.empty() ||
         std::find(field.choices.begin(), field.choices.end(), value) != field.choices.end();
}

/// Applies values and gathers problems; `where` is file:line or the flag.
class Applier {
 public:
  explicit Applier(std::span<const Field> fields) : fields_(fields) {}

  void apply_file(const std::string& path);
  void apply_flags(const std::vector<std::string>& flags);

  [[nodiscard]] Expected<Origins> finish() && {
    if (!problems_.empty()) {
      return join_problems("config", problems_);
    }
    return std::move(origins_);
  }

 private:
  template <typename... Args>
  void problem(const std::string& where, fmt::format_string<Args...> format, Args&&... args) {
    problems_.push_back(where + ": " + fmt::format(format, std::forward<Args>(args)...));
  }

  /// Stores what `convert.operator()<T>()` makes of a source; reports a wrong type or choice.
  template <typename Convert>
  void store(const Field& field, Origin origin, const std::string& shown, Convert convert) {
    const bool stored = std::visit(
        [&](auto* target) {
          auto value = convert.template operator()<ValueOf<decltype(target)>>();
          if (!value) {
            problem(origin.where, "{}: expected {}, got {}", full_name(field), field_type(field),
                    shown);
            return false;
          }
          if constexpr (std::is_same_v<ValueOf<decltype(target)>, std::string>) {
            if (!is_allowed(field, *value)) {
              problem(origin.where, "{}: expected one of {}, got '{}'", full_name(field),
                      fmt::join(field.choices, ", "), *value);
              return false;
            }
          }
          *target = *std::move(value);
          return true;
        },
        field.value);
    if (stored) {
      origins_[full_name(field)] = std::move(origin);
    }
  }

  void store_text(const Field& field, const std::string& where, const std::string& text) {
    store(field, {OriginKind::kFlag, where}, fmt::format("'{}'", text),
          [&text]<typename T>() { return from_text<T>(text); });
  }

  void apply_table(const std::string& path, std::string_view name, const toml::table& table);
  void apply_set(const std::string& assignment);
  const Field* find_dashed(const std::string& where, std::string_view key);
  std::size_t apply_dashed(const std::vector<std::string>& flags, std::size_t index);

  std::span<const Field> fields_;
  Origins origins_;
  std::vector<std::string> problems_;
};

std::string line_of(const std::string& path, const toml::source_region& source) {
  return fmt::format("{}:{}", path, source.begin.line);
}

void Applier::apply_table(const std::string& path, std::string_view name,
                          const toml::table& table) {
  for (const auto& [key, node] : table) {
    const std::string where = line_of(path, key.source());
    const Field* field = find_field(fields_, name, key.str());
    if (field == nullptr) {
      problem(where, "unknown key '{}' in [{}]; the nearest known is '{}'", key.str(), name,
              nearest_key(fields_, name, key.str()));
      continue;
    }
    std::ostringstream shown;
    shown << toml::node_view<const toml::node>(node);
    store(*field, {OriginKind::kFile, where}, shown.str(),
          [&node = node]<typename T>() { return from_node<T>(node); });
  }
}

void Applier::apply_file(const std::string& path) {
  toml::table root;
  try {
    root = toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    // begin is 0 when the file could not be opened at all.
    const auto line = error.source().begin.line;
    problem(line == 0 ? path : line_of(path, error.source()), "{}", error.description());
    return;
  }
  const std::vector<std::string> tables = table_names(fields_);
  for (const auto& [key, node] : root) {
    const std::string where = line_of(path, key.source());
    const bool known = std::find(tables.begin(), tables.end(), key.str()) != tables.end();
    if (known && node.is_table()) {
      apply_table(path, key.str(), *node.as_table());
    } else if (known) {
      problem(where, "'{}' is a table: write [{}]", key.str(), key.str());
    } else if (node.is_table()) {
      problem(where, "unknown table [{}]; the nearest known is [{}]", key.str(),
              nearest(key.str(), tables));
    } else {
      problem(where, "key '{}' stands outside any table; the nearest known is '{}'", key.str(),
              nearest_key(fields_, "", key.str()));
    }
  }
}

void Applier::apply_set(const std::string& assignment) {
  const std::string where = "--set " + assignment;
  const std::size_t equals = assignment.find('=');
  const std::size_t dot = assignment.find('.');
  if (equals == std::string::npos || dot == std::string::npos || dot > equals) {
    problem(where, "expected --set table.key=value");
    return;
  }
  const std::string table = assignment.substr(0, dot);
  const std::string key = assignment.substr(dot + 1, equals - dot - 1);
  if (const Field* field = find_field(fields_, table, key)) {
    store_text(*field, where, assignment.substr(equals + 1));
    return;
  }
  const std::vector<std::string> tables = table_names(fields_);
  if (std::find(tables.begin(), tables.end(), table) == tables.end()) {
    problem(where, "unknown table [{}]; the nearest known is [{}]", table, nearest(table, tables));
  } else {
    problem(where, "unknown key '{}' in [{}]; the nearest known is '{}'", key, table,
            nearest_key(fields_, table, key));
  }
}

/// The one field with this key in any table; reports when two tables have it.
const Field* Applier::find_dashed(const std::string& where, std::string_view key) {
  const Field* found = nullptr;
  for (const Field& field : fields_) {
    if (field.key != key) {
      continue;
    }
    if (found != nullptr) {
      problem(where, "ambiguous: write --set {}=... or --set {}=...", full_name(*found),
              full_name(field));
      return nullptr;
    }
    found = &field;
  }
  return found;
}

/// Handles flags[index], a dashed key; returns the index of the next unread word.
std::size_t Applier::apply_dashed(const std::vector<std::string>& flags, std::size_t index) {
  const std::string& word = flags[index];
  const std::size_t equals = std::min(word.find('='), word.size());
  const std::string where = word.substr(0, equals);
  std::string key = where.substr(2);
  std::replace(key.begin(), key.end(), '-', '_');

  const std::size_t num_problems = problems_.size();
  const Field* field = find_dashed(where, key);
  for (const std::string_view prefix : {"no_", "disable_"}) {
    if (field == nullptr && key.starts_with(prefix)) {
      const Field* negated = find_dashed(where, std::string_view(key).substr(prefix.size()));
      if (negated != nullptr && is_bool(*negated) && equals == word.size()) {
        store_text(*negated, where, "false");
        return index + 1;
      }
    }
  }
  const bool has_next = index + 1 < flags.size() && !flags[index + 1].starts_with("--");
  if (field == nullptr) {
    if (problems_.size() == num_problems) {
      std::string dashed = nearest_key(fields_, "", key);
      std::replace(dashed.begin(), dashed.end(), '_', '-');
      problem(where, "unknown flag; the nearest known is '--{}'", dashed);
    }
    return index + (equals == word.size() && has_next ? 2U : 1U);
  }
  if (equals < word.size()) {
    store_text(*field, where, word.substr(equals + 1));
    return index + 1;
  }
  if (is_bool(*field) && !(has_next && from_text<bool>(flags[index + 1]))) {
    store_text(*field, where, "true");
    return index + 1;
  }
  if (!has_next) {
    problem(where, "{}: expected {} after the flag", full_name(*field), field_type(*field));
    return index + 1;
  }
  store_text(*field, where, flags[index + 1]);
  return index + 2;
}

void Applier::apply_flags(const std::vector<std::string>& flags) {
  for (std::size_t i = 0; i < flags.size();) {
    if (flags[i] == "--set" && i + 1 < flags.size()) {
      apply_set(flags[i + 1]);
      i += 2;
    } else if (flags[i].starts_with("--") && flags[i].size() > 2 && flags[i] != "--set") {
      i = apply_dashed(flags, i);
    } else {
      problem(flags[i], "expected --set table.key=value or --key value");
      ++i;
    }
  }
}

/// A value in TOML; numbers in the shortest form that reads back the same.
template <typename T>
std::string to_toml(const T& value) {
  if constexpr (std::is_same_v<T, double>) {
    // {} writes 1e-06 for small numbers and 1 for 1.0; both read back as numbers.
    return fmt::format("{}", value);
  } else if constexpr (std::is_same_v<T, std::string>) {
    std::ostringstream out;
    out << toml::value<std::string>(value);
    return out.str();
  } else if constexpr (std::is_same_v<T, StringList>) {
    std::vector<std::string> parts;
    std::transform(value.begin(), value.end(), std::back_inserter(parts), to_toml<std::string>);
    return fmt::format("[{}]", fmt::join(parts, ", "));
  } else {
    return fmt::format("{}", value);
  }
}

/// The field's value in TOML; nullopt when it is an empty optional.
std::optional<std::string> value_text(const Field& field) {
  return std::visit(
      [](const auto* p) -> std::optional<std::string> {
        using Value = std::remove_cvref_t<decltype(*p)>;
        if constexpr (std::is_same_v<Value, ValueOf<Value*>>) {
          return to_toml(*p);
        } else {
          return p->has_value() ? std::optional(to_toml(**p)) : std::nullopt;
        }
      },
      field.value);
}

std::string origin_text(const Field& field, const Origins& origins) {
  const auto it = origins.find(full_name(field));
  return it == origins.end() ? "default" : it->second.where;
}

}  // namespace

Failure join_problems(std::string_view title, std::span<const std::string> problems) {
  if (problems.size() == 1) {
    return Failure{fmt::format("{}: {}", title, problems[0])};
  }
  return Failure{
      fmt::format("{}: {} problems\n  {}", title, problems.size(), fmt::join(problems, "\n  "))};
}

Expected<Origins> apply_sources(std::span<const Field> fields, const ConfigSources& sources) {
  Applier applier(fields);
  if (!sources.path.empty()) {
    applier.apply_file(sources.path);
  }
  applier.apply_flags(sources.flags);
  return std::move(applier).finish();
}

std::string print_resolved(std::span<const Field> fields, const Origins& origins) {
  std::string out;
  std::string_view table;
  for (const Field& field : fields) {
    if (field.table != table) {
      table = field.table;
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", table);
    }
    const std::optional<std::string> value = value_text(field);
    const std::string line =
        value ? fmt::format("{} = {}", field.key, *value) : fmt::format("# {} is unset", field.key);
    out += fmt::format("{:<50} # {}\n", line, origin_text(field, origins));
  }
  return out;
}

std::string describe_fields(std::span<const Field> fields) {
  std::string out;
  std::string_view table;
  for (const Field& field : fields) {
    if (field.table != table) {
      table = field.table;
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", table);
    }
    const std::string choices =
        field.choices.empty() ? "" : fmt::format(" [{}]", fmt::join(field.choices, ", "));
    out += fmt::format("  {} ({}, default {}){}{}{}\n", field.key, field_type(field),
                       value_text(field).value_or("unset"), field.doc.empty() ? "" : ": ",
                       field.doc, choices);
  }
  return out;
}

}  // namespace tandem
