#include "text/utf8.h"

#include "core/check.h"

namespace tandem {
namespace {

struct Lead {
  std::size_t length;  // of the whole character; 0 = not a lead byte
  std::uint8_t low;    // range of the second byte; later bytes are 80..BF
  std::uint8_t high;
};

constexpr Lead lead_of(std::uint8_t byte) {
  if (byte < 0xC2) {
    return {0, 0, 0};
  }
  if (byte < 0xE0) {
    return {2, 0x80, 0xBF};
  }
  if (byte < 0xF0) {
    return {3, static_cast<std::uint8_t>(byte == 0xE0 ? 0xA0 : 0x80),
            static_cast<std::uint8_t>(byte == 0xED ? 0x9F : 0xBF)};
  }
  if (byte < 0xF5) {
    return {4, static_cast<std::uint8_t>(byte == 0xF0 ? 0x90 : 0x80),
            static_cast<std::uint8_t>(byte == 0xF4 ? 0x8F : 0xBF)};
  }
  return {0, 0, 0};
}

}  // namespace

Utf8Char first_utf8_char(std::string_view text) {
  TDM_DCHECK(!text.empty());
  const auto byte_at = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t first = byte_at(0);
  if (first < 0x80) {
    return {Utf8Kind::kValid, first, 1};
  }
  const Lead lead = lead_of(first);
  if (lead.length == 0) {
    return {Utf8Kind::kInvalid, 0, 1};
  }
  std::uint32_t code = first & (0x7FU >> lead.length);
  for (std::size_t i = 1; i < lead.length; ++i) {
    if (i == text.size()) {
      return {Utf8Kind::kIncomplete, 0, i};
    }
    const std::uint8_t byte = byte_at(i);
    const std::uint8_t low = i == 1 ? lead.low : std::uint8_t{0x80};
    const std::uint8_t high = i == 1 ? lead.high : std::uint8_t{0xBF};
    if (byte < low || byte > high) {
      return {Utf8Kind::kInvalid, 0, i};
    }
    code = (code << 6) | (byte & 0x3FU);
  }
  return {Utf8Kind::kValid, code, lead.length};
}

std::string to_valid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const Utf8Char next = first_utf8_char(bytes);
    out += next.kind == Utf8Kind::kValid ? bytes.substr(0, next.length) : kReplacementCharacter;
    bytes.remove_prefix(next.length);
  }
  return out;
}

bool is_valid_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const Utf8Char next = first_utf8_char(bytes);
    if (next.kind != Utf8Kind::kValid) {
      return false;
    }
    bytes.remove_prefix(next.length);
  }
  return true;
}

bool is_python_space(std::uint32_t code) {
  return (code >= 0x09 && code <= 0x0D) || (code >= 0x1C && code <= 0x20) || code == 0x85 ||
         code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 ||
         code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

bool is_blank(std::string_view text) {
  while (!text.empty()) {
    const Utf8Char next = first_utf8_char(text);
    if (next.kind != Utf8Kind::kValid || !is_python_space(next.code)) {
      return false;
    }
    text.remove_prefix(next.length);
  }
  return true;
}

}  // namespace tandem
