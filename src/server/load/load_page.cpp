// The page of a measured load. Charts are SVG drawn here, so the page needs no script.
#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "core/checked_cast.h"
#include "server/load/load_report.h"
#include "text/html.h"

namespace tandem::server::assets {
std::string_view load_page_html();
}  // namespace tandem::server::assets

namespace tandem::load {
namespace {

constexpr double kMs = 1000;
constexpr double kWidth = 560;  // of a drawing, in its own units
constexpr double kHeight = 200;
constexpr double kLeft = 52;  // room for the numbers of the axes
constexpr double kBottom = 24;
constexpr double kTop = 14;
constexpr double kRight = 14;
constexpr std::size_t kNumBars = 48;

/// A range of values and where it lies in the drawing.
struct Axis {
  double first = 0;
  double last = 1;
  double begin = 0;
  double end = 0;

  [[nodiscard]] double place(double value) const {
    return begin + (value - first) / (last - first) * (end - begin);
  }
  /// Round numbers in the range, about five.
  [[nodiscard]] std::vector<double> ticks() const {
    const double rough = (last - first) / 5;
    const double power = std::pow(10, std::floor(std::log10(rough)));
    const double lead = rough / power;
    const double step = power * (lead < 1.5 ? 1 : lead < 3.5 ? 2 : lead < 7.5 ? 5 : 10);
    std::vector<double> out;
    for (double n = std::ceil(first / step); n * step <= last; ++n) {
      out.push_back(n * step);
    }
    return out;
  }
};

Axis x_axis(double first, double last) {
  return {first, last > first ? last : first + 1, kLeft, kWidth - kRight};
}
Axis y_axis(double most) {
  return {0, most > 0 ? most * 1.05 : 1, kHeight - kBottom, kTop};
}

std::string grid(const Axis& x, const Axis& y) {
  std::string out;
  for (const double tick : y.ticks()) {
    out += fmt::format(
        "<line class=\"axis\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>"
        "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:g}</text>",
        kLeft, kWidth - kRight, y.place(tick), y.place(tick), kLeft - 6, y.place(tick) + 4, tick);
  }
  for (const double tick : x.ticks()) {
    out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:g}</text>",
                       x.place(tick), kHeight - 6, tick);
  }
  return out;
}

std::string card(const std::string& title, const std::string& note, const std::string& drawing) {
  return fmt::format(
      "<section class=\"chart\"><h3>{0}</h3><p>{1}</p><svg viewBox=\"0 0 {2} {3}\" role=\"img\" "
      "aria-label=\"{0}\">{4}</svg></section>\n",
      escape_html(title), escape_html(note), kWidth, kHeight, drawing);
}

std::string bar(const Axis& y, double left, double right, double value, const std::string& tip) {
  return fmt::format(
      "<rect class=\"bar\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\">"
      "<title>{}</title></rect>",
      left, y.place(value), std::max(0.5, right - left - 1), y.place(0) - y.place(value), tip);
}

std::string mark(const Axis& x, double value, const char* name) {
  return fmt::format(
      "<line class=\"mark\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/>"
      "<text x=\"{0:.1f}\" y=\"{3}\" text-anchor=\"middle\">{4}</text>",
      x.place(value), kTop, kHeight - kBottom, kTop - 3, name);
}

/// How often each time came; what lies far beyond P99 stands in the last bar.
std::string histogram(const std::string& title, const std::string& what,
                      std::vector<double> seconds) {
  if (seconds.empty()) {
    return {};
  }
  std::ranges::sort(seconds);
  const double median_ms = kMs * percentile(seconds, 50);
  const double p99_ms = kMs * percentile(seconds, 99);
  const double first = kMs * seconds.front();
  const double last = std::min(kMs * seconds.back(), p99_ms + 0.1 * (p99_ms - first));
  const Axis x = x_axis(first, last);
  const double width = (x.last - x.first) / static_cast<double>(kNumBars);
  std::array<std::int64_t, kNumBars> counts{};
  for (const double value : seconds) {
    const auto at = static_cast<std::size_t>(std::max(0.0, (kMs * value - first) / width));
    ++counts[std::min(at, kNumBars - 1)];
  }
  const Axis y = y_axis(static_cast<double>(*std::ranges::max_element(counts)));
  std::string drawing = grid(x, y);
  for (std::size_t i = 0; i < kNumBars; ++i) {
    const double begin = first + static_cast<double>(i) * width;
    if (counts[i] > 0) {
      const bool is_rest = i + 1 == kNumBars && kMs * seconds.back() > x.last;
      drawing += bar(y, x.place(begin), x.place(begin + width), static_cast<double>(counts[i]),
                     fmt::format("{:.2f} to {:.2f} ms: {}", begin,
                                 is_rest ? kMs * seconds.back() : begin + width, counts[i]));
    }
  }
  drawing += mark(x, median_ms, "median");
  if (x.place(p99_ms) - x.place(median_ms) > 50) {
    drawing += mark(x, p99_ms, "P99");
  }
  return card(title, fmt::format("{} values, in ms; {}", seconds.size(), what), drawing);
}

std::string course(const std::string& title, const std::string& note, const Timeline& line,
                   const std::vector<double>& values) {
  if (values.empty()) {
    return {};
  }
  const Axis x = x_axis(0, static_cast<double>(values.size()) * line.bucket_s);
  const Axis y = y_axis(*std::ranges::max_element(values));
  std::string drawing = grid(x, y);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double begin = static_cast<double>(i) * line.bucket_s;
    drawing += bar(y, x.place(begin), x.place(begin + line.bucket_s), values[i],
                   fmt::format("{:.2f} s: {:.2f}", begin, values[i]));
  }
  return card(title, note, drawing);
}

std::string charts(const LoadReport& report) {
  constexpr double kMostBuckets = 120;
  Samples samples = samples_of(report.records);
  const Timeline line =
      timeline_of(report.records, std::max(report.summary.duration_s / kMostBuckets, 1e-6));
  std::string out =
      histogram("Time to the first token (TTFT)", "from sending to the first event with text",
                std::move(samples.ttft_s));
  out += histogram("Time per output token (TPOT)", "mean of a request, after its first token",
                   std::move(samples.tpot_s));
  out +=
      histogram("Inter-token latency (ITL)",
                report.has_exact_itl ? "gaps between tokens" : "gaps between chunks of the streams",
                std::move(samples.itl_s));
  out +=
      histogram("Whole request (E2E)", "from sending to the last event", std::move(samples.e2e_s));
  out +=
      course("Output tokens a second", "over the run, in seconds", line, line.output_tokens_per_s);
  out += course("Requests under way", "over the run, in seconds", line, line.running);
  return out;
}

std::string tile(const char* name, const std::string& value) {
  return fmt::format(
      "<div class=\"tile\"><div class=\"name\">{}</div><div class=\"value\">{}</div></div>\n", name,
      value);
}

std::string tiles(const LoadReport& report) {
  const LoadSummary& sum = report.summary;
  std::string out = tile("Requests completed", fmt::format("{}", sum.completed));
  out += tile("Failed", fmt::format("{}", sum.failed));
  out += tile("Requests a second", fmt::format("{:.2f}", sum.requests_per_s));
  out += tile("Output tokens a second", fmt::format("{:.1f}", sum.output_tokens_per_s));
  out += tile("All tokens a second", fmt::format("{:.1f}", sum.total_tokens_per_s));
  out += tile("Mean concurrency", fmt::format("{:.2f}", sum.concurrency));
  if (sum.cache_hit_rate) {
    out += tile("Prompt tokens cached", fmt::format("{:.1f} %", 100 * *sum.cache_hit_rate));
  }
  if (sum.goodput_per_s) {
    out += tile("Goodput, requests a second", fmt::format("{:.2f}", *sum.goodput_per_s));
  }
  return out;
}

std::string times_row(const char* name, const Distribution& values) {
  std::string row = fmt::format("<tr><td>{}</td><td class=\"number\">{}</td>", name, values.count);
  for (const double seconds : {values.mean, values.median, values.stddev, values.p90, values.p95,
                               values.p99, values.max}) {
    row += fmt::format("<td class=\"number\">{}</td>",
                       values.count > 0 ? fmt::format("{:.2f}", kMs * seconds) : "–");
  }
  return row + "</tr>\n";
}

std::string times_table(const LoadSummary& sum) {
  std::string out = "<table><thead><tr><th></th>";
  for (const char* name : {"values", "mean", "median", "std", "P90", "P95", "P99", "max"}) {
    out += fmt::format("<th class=\"number\">{}</th>", name);
  }
  out += "</tr></thead><tbody>\n" + times_row("TTFT", sum.ttft) + times_row("TPOT", sum.tpot) +
         times_row("ITL", sum.itl) + times_row("E2E", sum.e2e);
  return out + "</tbody></table>";
}

std::string errors_table(const LoadSummary& sum) {
  if (sum.errors.empty()) {
    return {};
  }
  std::string out =
      "<h2>Errors</h2>\n<div class=\"scroll\"><table><thead><tr><th>Kind</th>"
      "<th class=\"number\">Requests</th><th>The first</th></tr></thead><tbody>\n";
  for (const auto& [kind, group] : sum.errors) {
    out +=
        fmt::format("<tr><td class=\"bad\">{}</td><td class=\"number\">{}</td><td>{}</td></tr>\n",
                    escape_html(kind), group.count, escape_html(group.example));
  }
  return out + "</tbody></table></div>";
}

std::string setting_table(const LoadReport& report) {
  std::string out = "<table><tbody>\n";
  for (const auto& [name, value] : report.setting) {
    out += fmt::format("<tr><th>{}</th><td>{}</td></tr>\n", escape_html(name), escape_html(value));
  }
  if (report.slo.is_set()) {
    out += fmt::format("<tr><th>goodput</th><td>{}</td></tr>\n", escape_html(describe(report.slo)));
  }
  return out + "</tbody></table>";
}

}  // namespace

std::string to_page(const LoadReport& report) {
  const std::array<PagePart, 6> parts = {{{"@TITLE@", "Load of a server"},
                                          {"@TILES@", tiles(report)},
                                          {"@CHARTS@", charts(report)},
                                          {"@TIMES@", times_table(report.summary)},
                                          {"@ERRORS@", errors_table(report.summary)},
                                          {"@SETTING@", setting_table(report)}}};
  return fill_page(server::assets::load_page_html(), parts);
}

}  // namespace tandem::load
