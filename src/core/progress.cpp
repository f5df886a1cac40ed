#include "core/progress.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

namespace tandem {
namespace {

constexpr std::int64_t kBarCells = 24;
// Longer lines would wrap and could not be redrawn in place.
constexpr std::size_t kMaxLineBytes = 110;

constexpr std::string_view kEraseLine = "\r\x1b[K";

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string format_duration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) {
    return "-:--";
  }
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  const std::int64_t hours = whole / 3600;
  const std::int64_t minutes = whole / 60 % 60;
  return hours > 0 ? fmt::format("{}:{:02}:{:02}", hours, minutes, whole % 60)
                   : fmt::format("{}:{:02}", minutes, whole % 60);
}

ProgressBar::ProgressBar(ProgressStyle style, Sink sink)
    : ProgressBar(style, std::move(sink), steady_seconds) {}

ProgressBar::ProgressBar(ProgressStyle style, Sink sink, Clock clock)
    : style_(style), sink_(std::move(sink)), clock_(std::move(clock)) {}

ProgressBar::~ProgressBar() {
  clear();
}

void ProgressBar::start(std::string_view label, std::int64_t total, std::int64_t done) {
  clear();
  label_ = label;
  note_.clear();
  total_ = std::max<std::int64_t>(total, 1);
  first_ = done_ = done;
  started_ = clock_();
  shown_ = started_;
  is_active_ = true;
  has_lines_ = false;
  if (style_ == ProgressStyle::kTerminal) {
    draw(started_);
  }
}

void ProgressBar::update(std::int64_t done, std::string_view note) {
  if (!is_active_) {
    return;
  }
  done_ = std::clamp<std::int64_t>(done, 0, total_);
  if (style_ == ProgressStyle::kOff) {
    return;
  }
  note_ = note;
  const double now = clock_();
  const double interval = style_ == ProgressStyle::kTerminal ? kRedrawInterval_s : kLineInterval_s;
  const bool erased = style_ == ProgressStyle::kTerminal && !is_drawn_;
  if (erased || now - shown_ >= interval) {
    draw(now);
  }
}

void ProgressBar::clear() {
  if (is_drawn_) {
    sink_(kEraseLine);
    is_drawn_ = false;
  }
}

void ProgressBar::finish() {
  clear();
  if (is_active_ && has_lines_) {
    draw(clock_());
  }
  is_active_ = false;
}

double ProgressBar::seconds_left() const {
  const std::int64_t made = done_ - first_;
  if (made <= 0) {
    return done_ >= total_ ? 0.0 : std::numeric_limits<double>::quiet_NaN();
  }
  return (clock_() - started_) / static_cast<double>(made) * static_cast<double>(total_ - done_);
}

void ProgressBar::draw(double now) {
  shown_ = now;
  if (style_ == ProgressStyle::kTerminal) {
    sink_(fmt::format("{}{}", kEraseLine, line(now)));
    is_drawn_ = true;
  } else {
    sink_(line(now) + "\n");
    has_lines_ = true;
  }
}

std::string ProgressBar::line(double now) const {
  const std::string time = done_ >= total_
                               ? fmt::format("{} in all", format_duration(now - started_))
                               : fmt::format("{} left", format_duration(seconds_left()));
  std::string text = label_;
  if (style_ == ProgressStyle::kTerminal) {
    const std::int64_t filled = kBarCells * done_ / total_;
    text += fmt::format(" [{:#<{}}{:.<{}}]", "", filled, "", kBarCells - filled);
  }
  text += fmt::format(" {}/{} {:.0f}%  {}", done_, total_,
                      100.0 * static_cast<double>(done_) / static_cast<double>(total_), time);
  if (!note_.empty()) {
    text += "  " + note_;
  }
  if (style_ == ProgressStyle::kTerminal && text.size() > kMaxLineBytes) {
    text.resize(kMaxLineBytes);
  }
  return text;
}

}  // namespace tandem
