// progress.h — a progress bar with the time left. Only formats and decides when to show: where the
// text goes is the caller's sink, so libraries still print nothing.
//
// On a terminal one line is redrawn in place. Elsewhere (a file, a pipe) a whole line appears every
// few seconds and at the end, so that a log stays short and readable.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tandem {

/// kOff shows nothing and still knows the time left.
enum class ProgressStyle { kOff, kLines, kTerminal };

/// "0:07", "12:34", "1:02:03"; "-:--" for a negative or unknown (NaN) time.
[[nodiscard]] std::string format_duration(double seconds);

class ProgressBar {
 public:
  using Sink = std::function<void(std::string_view text)>;
  using Clock = std::function<double()>;  // seconds, never falling

  static constexpr double kRedrawInterval_s = 0.1;
  static constexpr double kLineInterval_s = 5.0;

  ProgressBar(ProgressStyle style, Sink sink);
  /// For tests: a clock that the test turns by hand.
  ProgressBar(ProgressStyle style, Sink sink, Clock clock);
  /// Erases what is still shown.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// A new phase of `total` units, `done` of which were there before it began (a resumed run) and
  /// do not count for the speed.
  void start(std::string_view label, std::int64_t total, std::int64_t done = 0);
  /// Shows the new state if it is time to. `note` follows the bar, e.g. "loss 0.41".
  void update(std::int64_t done, std::string_view note = {});
  /// Takes the bar off a terminal, so that a line can be printed; the next update draws it again.
  void clear();
  /// Ends the phase: clears a terminal, or writes the last line elsewhere if there was a line.
  void finish();

  /// Seconds until `total` at the mean speed of this phase; NaN while unknown.
  [[nodiscard]] double seconds_left() const;

 private:
  void draw(double now);
  [[nodiscard]] std::string line(double now) const;

  ProgressStyle style_;
  Sink sink_;
  Clock clock_;
  std::string label_;
  std::string note_;
  std::int64_t total_ = 0;
  std::int64_t first_ = 0;
  std::int64_t done_ = 0;
  double started_ = 0;
  double shown_ = 0;        // when the last line or drawing was
  bool is_active_ = false;  // between start() and finish()
  bool is_drawn_ = false;   // a bar stands on the terminal
  bool has_lines_ = false;  // this phase wrote a line
};

}  // namespace tandem
