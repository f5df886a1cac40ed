// string_formats.h — JSON schema's "format" as regular expressions.
#pragma once

#include <string_view>

namespace tandem::grammar {

/// The pattern of the whole string; empty: the format is not supported. Dates are those of the
/// calendar; times need an offset (RFC 3339); e-mail addresses are those without quotes.
[[nodiscard]] std::string_view format_pattern(std::string_view format);

}  // namespace tandem::grammar
