#include "text/html.h"

#include <algorithm>

#include "text/utf8.h"

namespace tandem {

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : to_valid_utf8(text)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string fill_page(std::string_view page, std::span<const PagePart> parts) {
  std::string out;
  for (std::size_t at = 0; at < page.size();) {
    const std::string_view rest = page.substr(at);
    const auto part = std::ranges::find_if(
        parts, [&](const PagePart& candidate) { return rest.starts_with(candidate.first); });
    if (part != parts.end()) {
      out += part->second;
      at += part->first.size();
    } else {
      out += page[at++];
    }
  }
  return out;
}

}  // namespace tandem
