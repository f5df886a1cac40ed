// kimi_markers.h — the markers of a Kimi K3 turn, and the escapes in the attributes of its headers.
// Source: spec kimi-k3.md 9.3.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "text/tokenizer.h"

namespace tandem {

/// Ids of <|open|>, <|close|>, <|sep|>.
struct KimiMarkers {
  std::int32_t open = -1;
  std::int32_t close = -1;
  std::int32_t sep = -1;
};

/// Whether turns have channels: the tokenizer has all three markers.
[[nodiscard]] bool has_markers(const Tokenizer& tokenizer);
/// Of a tokenizer that has them.
[[nodiscard]] KimiMarkers markers_of(const Tokenizer& tokenizer);

/// An attribute's value as it stands between quotes, and back.
[[nodiscard]] std::string escape_attribute(std::string_view value);
[[nodiscard]] std::string unescape_attribute(std::string_view value);

}  // namespace tandem
