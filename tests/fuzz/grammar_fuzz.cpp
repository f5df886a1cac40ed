// Schemas and regular expressions from outside: compilation ends, and what it gives never leads
// into a dead end. First byte: even = schema, odd = regex; the second seeds the walk.
#include <cstdint>
#include <string>
#include <string_view>

#include "core/check.h"
#include "text/grammar/grammar_session.h"

namespace tandem {
namespace {

void check_grammar(std::string_view input) {
  static const testing::GrammarSession kSession;
  if (input.size() < 2) {
    return;
  }
  const bool is_schema = input[0] % 2 == 0;
  Rng rng(static_cast<unsigned char>(input[1]));
  input.remove_prefix(2);
  const GrammarLimits limits{.max_states = 20'000, .max_compile_s = 5};
  const auto grammar =
      is_schema ? compile_json_schema(input, limits) : compile_regex(input, limits);
  if (!grammar) {
    TDM_CHECK(!grammar.message().empty());
    return;
  }
  const auto walk = kSession.walk(**grammar, rng, false, 20);
  TDM_CHECK(walk.problem.empty(), walk.problem);
  TDM_CHECK(!walk.finished || kSession.matches(**grammar, walk.text), walk.text);
}

}  // namespace
}  // namespace tandem

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tandem::check_grammar(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
