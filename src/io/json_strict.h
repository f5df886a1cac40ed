// json_strict.h — JSON that is not trusted: files, and bodies of requests. Inside io/ and server/
// only: the library's type must not leave these layers.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace tandem::detail {

/// The parsed document. Refuses what the library lets pass: a byte order mark, text after a NUL,
/// duplicate keys, and nesting deeper than `max_depth` (checked before parsing, so that no later
/// recursion over the document can overflow). Errors: a Failure without file name ("at byte 12:
/// ..." with an offset from 0): the caller puts the file in front.
[[nodiscard]] Expected<nlohmann::json> parse_json_strict(std::string_view text, int max_depth);

/// `text` as shown in a message: quoted, control characters escaped, cut after 120 bytes.
[[nodiscard]] std::string show_text(std::string_view text);

}  // namespace tandem::detail
