#include "text/grammar/char_set.h"

#include <algorithm>
#include <array>

#include "core/checked_cast.h"

namespace tandem::grammar {
namespace {

constexpr CodeRange kSurrogates{0xD800, 0xDFFF};

std::size_t utf8_length(std::uint32_t code) {
  return code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
}

std::array<std::uint8_t, 4> utf8_bytes(std::uint32_t code) {
  const std::size_t length = utf8_length(code);
  std::array<std::uint8_t, 4> bytes{};
  if (length == 1) {
    bytes[0] = checked_cast<std::uint8_t>(code);
    return bytes;
  }
  for (std::size_t i = length - 1; i > 0; --i) {
    bytes[i] = checked_cast<std::uint8_t>(0x80 | (code & 0x3F));
    code >>= 6;
  }
  const std::uint32_t lead = length == 2 ? 0xC0 : length == 3 ? 0xE0 : 0xF0;
  bytes[0] = checked_cast<std::uint8_t>(lead | code);
  return bytes;
}

// The first code point after which the spelling of [low, high] changes its length, or splits into
// ranges that are not a product of byte ranges; `high` when it is one sequence.
std::uint32_t first_part_end(CodeRange range) {
  for (const std::uint32_t last : {0x7FU, 0x7FFU, 0xFFFFU}) {
    if (range.low <= last && range.high > last) {
      return last;
    }
  }
  for (std::uint32_t shift = 6; shift < 6 * utf8_length(range.low); shift += 6) {
    const std::uint32_t mask = (1U << shift) - 1;
    if ((range.low & ~mask) == (range.high & ~mask)) {
      continue;
    }
    if ((range.low & mask) != 0) {
      return range.low | mask;
    }
    if ((range.high & mask) != mask) {
      return (range.high & ~mask) - 1;
    }
  }
  return range.high;
}

}  // namespace

CharSet::CharSet(std::initializer_list<CodeRange> ranges) : ranges_(ranges) {}

CharSet CharSet::all() {
  return {{0, kMaxCodePoint}};
}

void CharSet::add(const CharSet& other) {
  ranges_.insert(ranges_.end(), other.ranges_.begin(), other.ranges_.end());
}

CharSet CharSet::negated() const {
  CharSet result;
  std::uint32_t next = 0;
  for (const CodeRange& range : ranges()) {
    if (range.low > next) {
      result.add({next, range.low - 1});
    }
    next = range.high + 1;
  }
  if (next <= kMaxCodePoint) {
    result.add({next, kMaxCodePoint});
  }
  return result;
}

std::vector<CodeRange> CharSet::ranges() const {
  std::vector<CodeRange> sorted;
  for (const CodeRange& range : ranges_) {
    if (range.low < kSurrogates.low) {
      sorted.push_back({range.low, std::min(range.high, kSurrogates.low - 1)});
    }
    if (range.high > kSurrogates.high) {
      sorted.push_back({std::max(range.low, kSurrogates.high + 1), range.high});
    }
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const CodeRange& a, const CodeRange& b) { return a.low < b.low; });
  std::vector<CodeRange> merged;
  for (const CodeRange& range : sorted) {
    if (!merged.empty() && range.low <= merged.back().high + 1) {
      merged.back().high = std::max(merged.back().high, range.high);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

std::vector<ByteSequence> utf8_sequences(const CharSet& set) {
  std::vector<ByteSequence> sequences;
  for (const CodeRange& range : set.ranges()) {
    for (std::uint32_t first = range.low; first <= range.high;) {
      std::uint32_t last = range.high;
      for (std::uint32_t end = last; (end = first_part_end({first, last})) != last;) {
        last = end;
      }
      const auto low = utf8_bytes(first);
      const auto high = utf8_bytes(last);
      ByteSequence& sequence = sequences.emplace_back();
      for (std::size_t i = 0; i < utf8_length(first); ++i) {
        sequence.push_back({low[i], high[i]});
      }
      first = last + 1;
    }
  }
  return sequences;
}

}  // namespace tandem::grammar
