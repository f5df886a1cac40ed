#include "text/bpe_vocab.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem {
namespace {

constexpr std::int32_t kNoRank = std::numeric_limits<std::int32_t>::max();

constexpr int base64_value(char c) {
  if (c >= 'A' && c <= 'Z') {
    return c - 'A';
  }
  if (c >= 'a' && c <= 'z') {
    return c - 'a' + 26;
  }
  if (c >= '0' && c <= '9') {
    return c - '0' + 52;
  }
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

// Appends the decoded bytes; false when `text` is not canonical padded base64 (RFC 4648 §4).
bool append_base64(std::vector<char>& out, std::string_view text) {
  if (text.empty() || text.size() % 4 != 0) {
    return false;
  }
  const std::size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  for (std::size_t at = 0; at < text.size(); at += 4) {
    const std::size_t pad = at + 4 == text.size() ? padding : 0;
    std::uint32_t group = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const int value = i < 4 - pad ? base64_value(text[at + i]) : 0;
      if (value < 0) {
        return false;
      }
      group = (group << 6) | static_cast<std::uint32_t>(value);
    }
    for (std::size_t i = 0; i < 3 - pad; ++i) {
      out.push_back(static_cast<char>((group >> (16 - 8 * i)) & 0xFFU));
    }
    if (pad > 0 && (group & ((1U << (8 * pad)) - 1)) != 0) {
      return false;  // bits beyond the last byte: two spellings of one token
    }
  }
  return true;
}

struct Line {
  std::size_t offset = 0;  // of the token's bytes in the arena
  std::size_t length = 0;
  std::int32_t rank = 0;
};

std::optional<std::int32_t> parse_rank(std::string_view text) {
  std::int32_t rank = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, rank);
  if (error != std::errc() || stop != end || rank < 0) {
    return std::nullopt;
  }
  return rank;
}

Expected<std::vector<Line>> parse_lines(std::string_view text, std::vector<char>& arena,
                                        const std::string& path) {
  std::vector<Line> lines;
  while (!text.empty()) {
    const std::size_t number = lines.size() + 1;
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::size_t space = line.find(' ');
    if (space == std::string_view::npos) {
      return fail("{}:{}: expected \"base64 rank\"", path, number);
    }
    const std::size_t offset = arena.size();
    if (!append_base64(arena, line.substr(0, space))) {
      return fail("{}:{}: the token is not base64", path, number);
    }
    const auto rank = parse_rank(line.substr(space + 1));
    if (!rank) {
      return fail("{}:{}: the rank is not a number in 0..2^31-1", path, number);
    }
    lines.push_back({offset, arena.size() - offset, *rank});
  }
  return lines;
}

}  // namespace

Expected<BpeVocab> BpeVocab::parse(std::string_view text, const std::string& path) {
  BpeVocab vocab;
  vocab.arena_.reserve(text.size());  // base64 shrinks, so the views below never move
  auto lines = parse_lines(text, vocab.arena_, path);
  if (!lines) {
    return lines.failure();
  }
  std::vector<std::size_t> line_of(lines->size(), 0);  // by rank; 0 = not seen
  vocab.tokens_.resize(lines->size());
  vocab.ranks_.reserve(lines->size());
  for (std::size_t i = 0; i < lines->size(); ++i) {
    const Line& line = (*lines)[i];
    const auto rank = usize(line.rank);
    if (rank >= lines->size()) {
      return fail("{}:{}: rank {} leaves a gap: {} lines need the ranks 0..{}", path, i + 1, rank,
                  lines->size(), lines->size() - 1);
    }
    if (line_of[rank] != 0) {
      return fail("{}:{}: rank {} was given in line {} already", path, i + 1, rank, line_of[rank]);
    }
    line_of[rank] = i + 1;
    const std::string_view bytes(vocab.arena_.data() + line.offset, line.length);
    const auto [place, is_new] = vocab.ranks_.emplace(bytes, line.rank);
    if (!is_new) {
      return fail("{}:{}: the token was given in line {} already", path, i + 1,
                  line_of[usize(place->second)]);
    }
    vocab.tokens_[rank] = bytes;
    vocab.max_token_bytes_ = std::max(vocab.max_token_bytes_, bytes.size());
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    if (!vocab.ranks_.contains(std::string_view(&c, 1))) {
      return fail("{}: no token for the single byte 0x{:02X}", path, byte);
    }
  }
  return vocab;
}

std::string_view BpeVocab::bytes(std::int32_t id) const {
  TDM_CHECK(id >= 0 && id < size(), id);
  return tokens_[usize(id)];
}

std::int32_t BpeVocab::rank_of(std::string_view bytes) const {
  if (bytes.size() > max_token_bytes_) {
    return kNoRank;
  }
  const auto place = ranks_.find(bytes);
  return place == ranks_.end() ? kNoRank : place->second;
}

namespace {

// A pair of neighbours that may merge: the bytes [begin, end) of the pre-token.
struct Candidate {
  std::int32_t rank;
  std::size_t begin;
  std::size_t end;

  // Heap order: lowest rank on top, the leftmost of equals.
  bool operator<(const Candidate& other) const {
    return std::tie(rank, begin) > std::tie(other.rank, other.begin);
  }
};

// Parts of a pre-token as a linked list over their first bytes.
struct Part {
  std::size_t next = 0;  // first byte of the next part; 0 = merged away
  std::size_t prev = 0;
  std::int32_t rank = kNoRank;
};

}  // namespace

void BpeVocab::append_merged(std::vector<std::int32_t>& ids, std::string_view pre_token) const {
  if (pre_token.empty()) {
    return;
  }
  if (const std::int32_t whole = rank_of(pre_token); whole != kNoRank) {
    ids.push_back(whole);
    return;
  }
  const std::size_t n = pre_token.size();
  std::vector<Part> parts(n);
  std::vector<Candidate> heap;
  const auto offer = [&](std::size_t begin, std::size_t end) {
    const std::int32_t rank = rank_of(pre_token.substr(begin, end - begin));
    if (rank != kNoRank) {
      heap.push_back({rank, begin, end});
      std::push_heap(heap.begin(), heap.end());
    }
  };
  for (std::size_t i = 0; i < n; ++i) {
    parts[i] = {i + 1, i == 0 ? 0 : i - 1, rank_of(pre_token.substr(i, 1))};
    if (i + 2 <= n) {
      offer(i, i + 2);
    }
  }
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const Candidate best = heap.back();
    heap.pop_back();
    Part& left = parts[best.begin];
    const std::size_t middle = left.next;
    // Merges around a candidate make it stale: its left part is gone or the two parts now end
    // elsewhere. (If only the border between them moved, the joint bytes are still a valid merge.)
    if (middle == 0 || middle >= n || parts[middle].next != best.end) {
      continue;
    }
    parts[middle].next = 0;
    left.next = best.end;
    left.rank = best.rank;
    if (best.end < n) {
      parts[best.end].prev = best.begin;
      offer(best.begin, parts[best.end].next);
    }
    if (best.begin > 0) {
      offer(left.prev, best.end);
    }
  }
  for (std::size_t i = 0; i < n; i = parts[i].next) {
    ids.push_back(parts[i].rank);
  }
}

}  // namespace tandem
