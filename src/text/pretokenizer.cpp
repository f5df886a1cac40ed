#include "text/pretokenizer.h"

#include <string>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "core/check.h"
#include "core/error.h"
#include "text/utf8.h"

namespace tandem {
namespace {

// PCRE2 10.42 has no class intersection, but De Morgan gives it with a negated class: what is in
// none of the other general categories and not Han. That stays one class, which matters: a
// lookahead per character would cost a backtracking frame per character of a long word.
// The script must be written sc:Han; a bare \p{Han} means script extensions since PCRE2 10.40 and
// would take in "、" and other shared punctuation.
constexpr std::string_view kUpper = R"([^\p{Ll}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{sc:Han}])";
constexpr std::string_view kLower = R"([^\p{Lu}\p{Lt}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{sc:Han}])";
// Unicode White_Space. PCRE2's own \s adds U+180E, which is no space since Unicode 6.3.
constexpr std::string_view kSpaces = R"(\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A})"
                                     R"(\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr std::string_view kSuffix = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)";

std::string build_pattern() {
  const std::string lead = R"([^\r\n\p{L}\p{N}]?)";
  std::string pattern = R"(\p{sc:Han}+)";
  pattern += fmt::format("|{}{}*{}+{}", lead, kUpper, kLower, kSuffix);
  pattern += fmt::format("|{}{}+{}*{}", lead, kUpper, kLower, kSuffix);
  pattern += R"(|\p{N}{1,3})";
  pattern += fmt::format(R"(| ?[^{}\p{{L}}\p{{N}}]+[\r\n]*)", kSpaces);
  pattern += fmt::format(R"(|[{}]*[\r\n]+)", kSpaces);
  pattern += fmt::format(R"(|[{0}]+(?![^{0}]))", kSpaces);
  pattern += fmt::format("|[{}]+", kSpaces);
  return pattern;
}

struct CodeDeleter {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct MatchDataDeleter {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

// The bytes at the front of `text` that are well-formed (or, with `malformed`, that are not).
std::size_t stretch_length(std::string_view text, bool malformed) {
  std::size_t length = 0;
  while (length < text.size()) {
    const Utf8Char next = first_utf8_char(text.substr(length));
    if ((next.kind != Utf8Kind::kValid) != malformed) {
      break;
    }
    length += next.length;
  }
  return length;
}

}  // namespace

std::vector<std::string_view> cut_into_pieces(std::string_view text, PieceLimits limits) {
  std::vector<std::string_view> pieces;
  if (text.size() <= limits.run_chars && text.size() <= limits.piece_chars) {
    if (!text.empty()) {
      pieces.push_back(text);
    }
    return pieces;
  }
  std::size_t begin = 0;
  std::size_t chars_in_block = 0;  // since the last cut by piece_chars
  std::size_t run_length = 0;
  bool run_is_space = false;
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Char next = first_utf8_char(text.substr(at));
    const bool is_space = next.kind == Utf8Kind::kValid && is_python_space(next.code);
    const bool block_full = chars_in_block == limits.piece_chars;
    const bool run_goes_on = !block_full && is_space == run_is_space;
    const bool run_full = run_goes_on && run_length == limits.run_chars;
    if (block_full || run_full) {
      pieces.push_back(text.substr(begin, at - begin));
      begin = at;
    }
    chars_in_block = block_full ? 1 : chars_in_block + 1;
    run_length = run_goes_on && !run_full ? run_length + 1 : 1;
    run_is_space = is_space;
    at += next.length;
  }
  pieces.push_back(text.substr(begin));
  return pieces;
}

struct PreTokenizer::Impl {
  std::unique_ptr<pcre2_code, CodeDeleter> code;

  // Length of the pre-token at the front of `text`, which is well-formed and not empty.
  std::size_t match_front(std::string_view text, pcre2_match_data* match) const {
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    int rc = pcre2_match(code.get(), subject, text.size(), 0, PCRE2_NO_UTF_CHECK, match, nullptr);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
      rc = pcre2_match(code.get(), subject, text.size(), 0, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                       match, nullptr);
    }
    if (rc == PCRE2_ERROR_NOMEMORY || rc == PCRE2_ERROR_HEAPLIMIT) {
      throw_error("tokenizer: the regex engine ran out of memory on {} bytes", text.size());
    }
    // The alternatives cover every character, so a failed or empty match is a bug in the pattern.
    TDM_CHECK(rc > 0, rc);
    const std::size_t length = pcre2_get_ovector_pointer(match)[1];
    TDM_CHECK(length > 0);
    return length;
  }
};

PreTokenizer::PreTokenizer() : impl_(std::make_unique<Impl>()) {
  const std::string pattern = build_pattern();
  int error = 0;
  PCRE2_SIZE offset = 0;
  impl_->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                  PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &offset,
                                  nullptr));
  TDM_CHECK(impl_->code != nullptr, error, offset);
  // A failure leaves the interpreter, which gives the same matches, only slower.
  static_cast<void>(pcre2_jit_compile(impl_->code.get(), PCRE2_JIT_COMPLETE));
}

PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;
PreTokenizer& PreTokenizer::operator=(PreTokenizer&&) noexcept = default;
PreTokenizer::~PreTokenizer() = default;

std::vector<std::string_view> PreTokenizer::split(std::string_view piece) const {
  const std::unique_ptr<pcre2_match_data, MatchDataDeleter> match(
      pcre2_match_data_create(1, nullptr));
  if (match == nullptr) {
    throw_error("tokenizer: out of memory");
  }
  std::vector<std::string_view> tokens;
  while (!piece.empty()) {
    std::string_view text = piece.substr(0, stretch_length(piece, false));
    piece.remove_prefix(text.size());
    while (!text.empty()) {
      const std::size_t length = impl_->match_front(text, match.get());
      tokens.push_back(text.substr(0, length));
      text.remove_prefix(length);
    }
    if (const std::size_t malformed = stretch_length(piece, true); malformed > 0) {
      tokens.push_back(piece.substr(0, malformed));
      piece.remove_prefix(malformed);
    }
  }
  return tokens;
}

}  // namespace tandem
