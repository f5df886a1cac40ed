// html.h — putting text of others into pages.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace tandem {

/// As it may stand between tags and in quoted attributes; ill-formed UTF-8 becomes U+FFFD.
[[nodiscard]] std::string escape_html(std::string_view text);

/// "@NAME@" and what stands in its place.
using PagePart = std::pair<std::string_view, std::string>;

/// `page` with every part filled in, in one pass: what is filled in is never searched again.
[[nodiscard]] std::string fill_page(std::string_view page, std::span<const PagePart> parts);

}  // namespace tandem
