#include "text/grammar/string_formats.h"

#include <algorithm>
#include <array>

namespace tandem::grammar {
namespace {

struct Format {
  std::string_view name;
  std::string_view pattern;
};

// February 29 stands only in years that divide by 4, and by 400 when they divide by 100.
constexpr auto kFormats = std::to_array<Format>({
    {"date",
     R"((?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30))"
     R"(|02-(?:0[1-9]|1\d|2[0-8])))"
     R"(|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29))"},
    {"time", R"((?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?)"
             R"((?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d))"},
    {"date-time",
     R"((?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30))"
     R"(|02-(?:0[1-9]|1\d|2[0-8])))"
     R"(|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29))"
     R"(T(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d))"},
    {"uuid", "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"},
    {"email", R"([A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*)"
              R"(@[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)"
              R"((?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)+)"},
    {"ipv4", R"((?:(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d))"},
});

}  // namespace

std::string_view format_pattern(std::string_view format) {
  const auto place = std::find_if(kFormats.begin(), kFormats.end(),
                                  [&](const Format& known) { return known.name == format; });
  return place == kFormats.end() ? std::string_view() : place->pattern;
}

}  // namespace tandem::grammar
