#include "io/json_strict.h"

#include <iterator>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tandem::detail {
namespace {

using nlohmann::json;

/// Offset of the first bracket that nests deeper than `max_depth`. Brackets inside strings do not
/// count.
std::optional<std::size_t> too_deep_at(std::string_view text, int max_depth) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > max_depth) {
        return i;
      }
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return std::nullopt;
}

/// The library's message without its "[json.exception...] ".
std::string_view reason_of(const json::exception& error) {
  const std::string_view text = error.what();
  const auto end = text.find("] ");
  return end == std::string_view::npos ? text : text.substr(end + 2);
}

/// Characters of a text; all copies share the count of those read, which is where the parser is.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, std::size_t* num_read) : at_(at), num_read_(num_read) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    ++*num_read_;
    return *this;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }

 private:
  const char* at_;
  std::size_t* num_read_;
};

/// Remembers the keys of every open object; the library itself keeps the last of two equal keys.
class DuplicateKeys {
 public:
  explicit DuplicateKeys(const std::size_t* num_read) : num_read_(num_read) {}

  bool operator()(json::parse_event_t event, const json& value) {
    if (event == json::parse_event_t::object_start) {
      open_.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      open_.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!open_.back().insert(key).second && !found_) {
        found_ = fmt::format("before byte {}: duplicate key {}", *num_read_, show_text(key));
      }
    }
    return true;
  }
  /// The sentence about the first one.
  [[nodiscard]] const std::optional<std::string>& found() const { return found_; }

 private:
  const std::size_t* num_read_;
  std::vector<std::unordered_set<std::string>> open_;
  std::optional<std::string> found_;
};

}  // namespace

Expected<json> parse_json_strict(std::string_view text, int max_depth) {
  if (text.starts_with("\xEF\xBB\xBF")) {
    return fail("expected JSON, found a byte order mark");
  }
  if (const auto nul = text.find('\0'); nul != std::string_view::npos) {
    return fail("at byte {}: expected JSON, found a NUL byte", nul);
  }
  if (const auto deep = too_deep_at(text, max_depth)) {
    return fail("at byte {}: nested deeper than {} levels", *deep, max_depth);
  }
  std::size_t num_read = 0;
  DuplicateKeys duplicates(&num_read);
  try {
    json document = json::parse(CountingIterator(text.data(), &num_read),
                                CountingIterator(text.data() + text.size(), &num_read),
                                [&](int /*depth*/, json::parse_event_t event, json& value) {
                                  return duplicates(event, value);
                                });
    if (duplicates.found()) {
      return Failure{*duplicates.found()};
    }
    return document;
  } catch (const json::parse_error& error) {
    return fail("bad JSON at byte {}: {}", error.byte == 0 ? 0 : error.byte - 1,
                show_text(reason_of(error)));
  } catch (const json::exception& error) {  // a number outside the range of a double
    return fail("bad JSON before byte {}: {}", num_read, show_text(reason_of(error)));
  }
}

std::string show_text(std::string_view text) {
  constexpr std::size_t kMaxShown = 120;
  std::string out = "\"";
  for (const char c : text.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  out += text.size() > kMaxShown ? "...\"" : "\"";
  return out;
}

}  // namespace tandem::detail
