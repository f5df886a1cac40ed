#include "rl/report.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/checked_cast.h"
#include "io/lines.h"
#include "text/html.h"

namespace tandem {

/// Generated from src/rl/report/ and the packaged Chart.js.
namespace report_assets {
std::string_view chart_js();
std::string_view page_html();
std::string_view report_css();
std::string_view report_js();
}  // namespace report_assets

namespace {

using Json = nlohmann::ordered_json;

/// JSON that may stand inside <script>: no "</script>" or "<!--" can appear.
std::string script_json(const Json& json) {
  std::string out;
  for (const char c : json.dump(-1, ' ', false, Json::error_handler_t::replace)) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

struct Figure {
  std::string_view key;
  std::string_view label;
  std::string_view format;
  bool is_tile = false;
};

constexpr std::array<Figure, 14> kFigures = {{
    {"reward_mean", "Reward (training samples)", "{:.3f}", true},
    {"eval_accuracy", "Held-out accuracy, sampled", "{:.3f}", true},
    {"eval_accuracy_greedy", "Held-out accuracy, greedy", "{:.3f}", true},
    {"response_tokens_mean", "Response length (tokens)", "{:.1f}", true},
    {"truncated_fraction", "Truncated", "{:.3f}"},
    {"entropy", "Entropy (nats a token)", "{:.4f}", true},
    {"train_rollout_kl", "KL, rollout against trainer", "{:.3g}"},
    {"logprob_mismatch_max", "Largest log-prob mismatch", "{:.3g}"},
    {"train/ppo_kl", "KL inside a step", "{:.3g}"},
    {"train/pg_clipfrac", "Clip fraction", "{:.4f}"},
    {"grad_norm", "Gradient norm", "{:.3f}"},
    {"lr", "Learning rate", "{:.3g}"},
    {"rollout_tokens_per_s", "Rollout tokens/s", "{:.0f}"},
    {"train_tokens_per_s", "Training tokens/s", "{:.0f}"},
}};

std::optional<double> metric(const StepMetrics& step, std::string_view key) {
  std::optional<double> found;
  StepMetrics::visit_fields(step, [&](std::string_view name, const std::optional<double>& value) {
    if (name == key) {
      found = value;
    }
  });
  const auto it = step.extra.find(key);
  return it != step.extra.end() ? it->second : found;
}

struct FirstLast {
  std::optional<double> first;
  std::optional<double> last;
};

FirstLast first_last(const ReportRun& run, std::string_view key) {
  FirstLast out;
  for (const StepMetrics& step : run.steps) {
    if (const auto value = metric(step, key)) {
      out.first = out.first ? out.first : value;
      out.last = value;
    }
  }
  return out;
}

std::string number(const Figure& figure, const std::optional<double>& value) {
  return value ? fmt::format(fmt::runtime(figure.format), *value) : "–";
}

std::string tiles(const ReportRun& run) {
  std::string out;
  for (const Figure& figure : kFigures) {
    const FirstLast value = first_last(run, figure.key);
    if (figure.is_tile && value.last) {
      out += fmt::format(
          "<div class=\"tile\"><div class=\"name\">{}</div><div class=\"value\"><small>{} → "
          "</small>{}</div></div>\n",
          figure.label, number(figure, value.first), number(figure, value.last));
    }
  }
  return out;
}

/// One row a figure; two columns (first, last) a run.
std::string figures_table(std::span<const ReportRun> runs) {
  std::string out = "<table>\n<thead><tr><th>Figure</th>";
  for (const ReportRun& run : runs) {
    out += fmt::format("<th class=\"number\">{0}: first</th><th class=\"number\">{0}: last</th>",
                       escape_html(run.name));
  }
  out += "</tr></thead>\n<tbody>\n";
  for (const Figure& figure : kFigures) {
    std::string cells;
    bool is_measured = false;
    for (const ReportRun& run : runs) {
      const FirstLast value = first_last(run, figure.key);
      is_measured |= value.last.has_value();
      cells += fmt::format("<td class=\"number\">{}</td><td class=\"number\">{}</td>",
                           number(figure, value.first), number(figure, value.last));
    }
    if (is_measured) {
      out += fmt::format("<tr><td>{}</td>{}</tr>\n", figure.label, cells);
    }
  }
  return out + "</tbody>\n</table>";
}

std::string response_cell(const SampleRecord* sample) {
  if (sample == nullptr) {
    return "<td></td>";
  }
  const bool is_correct = sample->reward.value_or(0.0) >= 1.0;
  return fmt::format("<td><pre>{}</pre><span class=\"{}\">{} {}</span></td>",
                     escape_html(sample->response), is_correct ? "correct" : "wrong",
                     is_correct ? "✓" : "✗",
                     escape_html(sample->grade.empty() ? sample->status : sample->grade));
}

/// The sample that answers the same prompt, if any.
const SampleRecord* partner(const std::vector<SampleRecord>& samples, const SampleRecord& of) {
  const auto it = std::find_if(samples.begin(), samples.end(), [&](const SampleRecord& sample) {
    return sample.prompt == of.prompt && sample.sample_index == of.sample_index;
  });
  return it == samples.end() ? nullptr : &*it;
}

std::string transcript_rows(const ReportRun& run) {
  std::string rows;
  for (const SampleRecord& before : run.first_samples) {
    rows += fmt::format("<tr><td><pre>{}</pre></td>{}{}</tr>\n", escape_html(before.prompt),
                        response_cell(&before), response_cell(partner(run.last_samples, before)));
  }
  for (const SampleRecord& after : run.last_samples) {
    if (partner(run.first_samples, after) == nullptr) {
      rows += fmt::format("<tr><td><pre>{}</pre></td><td></td>{}</tr>\n", escape_html(after.prompt),
                          response_cell(&after));
    }
  }
  return rows;
}

std::string transcripts(std::span<const ReportRun> runs) {
  std::string out;
  for (const ReportRun& run : runs) {
    const std::string rows = transcript_rows(run);
    if (!rows.empty()) {
      out += fmt::format(
          "<h2>What the model wrote: {}</h2>\n<div class=\"scroll\"><table>\n<thead><tr>"
          "<th>Problem</th><th>Before (step {})</th><th>After (step {})</th></tr></thead>\n"
          "<tbody>\n{}</tbody>\n</table></div>\n",
          escape_html(run.name), run.first_sampled_step, run.last_sampled_step, rows);
    }
  }
  return out;
}

std::string configs(std::span<const ReportRun> runs) {
  std::string out;
  for (const ReportRun& run : runs) {
    out += fmt::format("<details><summary>{}</summary><pre>{}</pre></details>\n",
                       escape_html(run.name), escape_html(run.config));
  }
  return out;
}

std::string explanation(const std::string& text) {
  std::string out;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find("\n\n", begin), text.size());
    out += fmt::format("<p class=\"lead\">{}</p>\n", escape_html(text.substr(begin, end - begin)));
    begin = end + 2;
  }
  return out;
}

/// Every metric as one column a run, null where not measured.
Json chart_data(std::span<const ReportRun> runs) {
  Json list = Json::array();
  for (const ReportRun& run : runs) {
    Json steps = Json::array();
    Json series = Json::object();
    const auto put = [&](std::string_view name, const std::optional<double>& value) {
      Json& column = series[std::string(name)];
      while (column.size() + 1 < steps.size()) {
        column.push_back(nullptr);  // the metric was absent from earlier steps
      }
      column.push_back(value ? Json(*value) : Json(nullptr));
    };
    for (const StepMetrics& step : run.steps) {
      steps.push_back(step.step);
      StepMetrics::visit_fields(step, put);
      for (const auto& [name, value] : step.extra) {
        put(name, value);
      }
    }
    for (auto& [name, column] : series.items()) {
      while (column.size() < steps.size()) {
        column.push_back(nullptr);
      }
    }
    list.push_back({{"name", run.name}, {"steps", steps}, {"series", series}});
  }
  return Json{{"runs", list}};
}

}  // namespace

Expected<ReportRun> load_report_run(const std::string& dir, const std::string& split,
                                    std::int64_t max_transcripts) {
  auto store = RunStore::open_read_only(dir);
  if (!store) {
    return store.failure();
  }
  try {
    ReportRun run;
    const RunInfo info = store->info();
    run.name = info.name;
    run.config = info.config;
    for (const std::string& line : store->metrics_lines()) {
      auto step = parse_json_line(line);
      if (!step) {
        return fail("{}: {}", dir, step.message());
      }
      run.steps.push_back(*std::move(step));
    }
    const std::string used = store->sampled_steps(split).empty() ? "train" : split;
    const std::vector<std::int64_t> steps = store->sampled_steps(used);
    if (!steps.empty()) {
      run.first_sampled_step = steps.front();
      run.last_sampled_step = steps.back();
      run.first_samples = store->samples(steps.front(), used, max_transcripts);
      if (steps.size() > 1) {
        run.last_samples = store->samples(steps.back(), used, max_transcripts);
      }
    }
    return run;
  } catch (const Error& error) {
    return Failure{error.what()};
  }
}

std::string render_report(std::span<const ReportRun> runs, const ReportOptions& options) {
  TDM_CHECK(!runs.empty());
  const std::array<PagePart, 10> parts = {
      {{"@TITLE@", escape_html(options.title)},
       {"@CSS@", std::string(report_assets::report_css())},
       {"@EXPLANATION@", explanation(options.explanation)},
       {"@TILES@", runs.size() == 1 ? tiles(runs[0]) : std::string()},
       {"@FIGURES@", figures_table(runs)},
       {"@TRANSCRIPTS@", transcripts(runs)},
       {"@CONFIGS@", configs(runs)},
       {"@DATA@", script_json(chart_data(runs))},
       {"@CHART_JS@", std::string(report_assets::chart_js())},
       {"@SCRIPT@", std::string(report_assets::report_js())}}};
  return fill_page(report_assets::page_html(), parts);
}

void write_report(const std::string& path, std::span<const ReportRun> runs,
                  const ReportOptions& options) {
  rewrite_lines(path, std::array{render_report(runs, options)});
}

}  // namespace tandem
