// char_set.h — sets of Unicode characters, and the sequences of byte ranges that spell them in
// UTF-8.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem::grammar {

inline constexpr std::uint32_t kMaxCodePoint = 0x10FFFF;

struct CodeRange {
  std::uint32_t low = 0;
  std::uint32_t high = 0;  // inclusive

  friend bool operator==(const CodeRange&, const CodeRange&) = default;
};

/// Characters by ranges. Surrogates are no characters and never in a set.
class CharSet {
 public:
  CharSet() = default;
  CharSet(std::initializer_list<CodeRange> ranges);

  static CharSet all();
  void add(CodeRange range) { ranges_.push_back(range); }
  void add(const CharSet& other);
  [[nodiscard]] CharSet negated() const;
  /// Sorted, disjoint, not adjacent, without surrogates.
  [[nodiscard]] std::vector<CodeRange> ranges() const;

 private:
  std::vector<CodeRange> ranges_;  // in any order
};

struct ByteRange {
  std::uint8_t low = 0;
  std::uint8_t high = 0;  // inclusive
};

/// One to four byte ranges; every combination of their bytes is one character.
using ByteSequence = std::vector<ByteRange>;

/// Sequences that together spell exactly the set's characters.
[[nodiscard]] std::vector<ByteSequence> utf8_sequences(const CharSet& set);

}  // namespace tandem::grammar
