// tiny_vocab.h — a small tiktoken file made in memory: the 256 bytes and a few tokens by hand.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::testing {

inline std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    std::uint32_t group = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      const auto byte = at + i < bytes.size() ? static_cast<unsigned char>(bytes[at + i]) : 0U;
      group = (group << 8) | byte;
    }
    for (std::size_t i = 0; i < 4; ++i) {
      out += at + i <= bytes.size() ? kDigits[(group >> (18 - 6 * i)) & 63U] : '=';
    }
  }
  return out;
}

/// Rank r < 256 is the byte 255 - r (so that a rank is not its byte by accident); then `tokens`.
inline std::vector<std::string> tiny_vocab(const std::vector<std::string>& tokens) {
  std::vector<std::string> all;
  for (int rank = 0; rank < 256; ++rank) {
    all.emplace_back(1, static_cast<char>(255 - rank));
  }
  all.insert(all.end(), tokens.begin(), tokens.end());
  return all;
}

inline std::string tiktoken_text(const std::vector<std::string>& tokens) {
  std::string text;
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    text += base64(tokens[rank]) + " " + std::to_string(rank) + "\n";
  }
  return text;
}

inline std::int32_t byte_id(char c) {
  return 255 - static_cast<unsigned char>(c);
}

}  // namespace tandem::testing
