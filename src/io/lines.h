// lines.h — text files that grow by a line, such as metrics.jsonl.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace tandem {

/// Appends `line` and a newline in one write. Errors: throws Error when the disk refuses.
void append_line(const std::string& path, std::string_view line);

/// Makes the file consist of exactly `lines`, atomically. Errors: throws Error when the disk
/// refuses.
void rewrite_lines(const std::string& path, std::span<const std::string> lines);

}  // namespace tandem
