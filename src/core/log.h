// log.h — the one logging header. One structured line an event: log_info("engine.start", "pages={}
// slots={}", p, s). Libraries log, only cli/ prints. The sink is stderr; the level comes from
// `--log-level`.
#pragma once

#include <string_view>

#include <fmt/format.h>

namespace tandem {

enum class LogLevel { kDebug, kInfo, kWarn, kError, kOff };

void set_log_level(LogLevel level);
void log_line(LogLevel level, std::string_view event, std::string_view text);

template <typename... Args>
void log_debug(std::string_view event, fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kDebug, event, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_info(std::string_view event, fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kInfo, event, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_warn(std::string_view event, fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kWarn, event, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tandem
