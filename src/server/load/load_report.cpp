#include "server/load/load_report.h"

#include <array>
#include <tuple>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/checked_cast.h"
#include "io/json_strict.h"

namespace tandem::load {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr double kMs = 1000;

OrderedJson ms_or_null(const std::optional<double>& seconds) {
  return seconds ? OrderedJson(*seconds * kMs) : OrderedJson(nullptr);
}

void add_distribution(OrderedJson& json, const std::string& name, const Distribution& values) {
  const std::array<std::pair<const char*, double>, 7> figures = {{{"mean", values.mean},
                                                                  {"median", values.median},
                                                                  {"std", values.stddev},
                                                                  {"p90", values.p90},
                                                                  {"p95", values.p95},
                                                                  {"p99", values.p99},
                                                                  {"max", values.max}}};
  for (const auto& [figure, seconds] : figures) {
    json[fmt::format("{}_{}_ms", figure, name)] =
        values.count > 0 ? OrderedJson(seconds * kMs) : OrderedJson(nullptr);
  }
}

OrderedJson json_of(const RequestRecord& record) {
  OrderedJson json = {{"start_s", record.was_sent ? OrderedJson(record.start_s) : nullptr},
                      {"ttft_ms", ms_or_null(record.ttft_s())},
                      {"tpot_ms", ms_or_null(record.tpot_s())},
                      {"e2el_ms", record.is_complete() ? OrderedJson(record.latency_s() * kMs)
                                                       : OrderedJson(nullptr)},
                      {"input_tokens", record.prompt_tokens},
                      {"output_tokens", record.output_tokens},
                      {"cached_tokens", nullptr}};
  if (record.cached_tokens) {
    json["cached_tokens"] = *record.cached_tokens;
  }
  if (!record.is_complete()) {
    json["error_kind"] = record.error_kind;
    json["error"] = record.error;
  }
  return json;
}

std::string distribution_row(const char* name, const Distribution& values) {
  if (values.count == 0) {
    return fmt::format("{:<10}{:>10}\n", name, "-");
  }
  std::string row = fmt::format("{:<10}", name);
  for (const double seconds : {values.mean, values.median, values.stddev, values.p90, values.p95,
                               values.p99, values.max}) {
    row += fmt::format("{:>10.2f}", seconds * kMs);
  }
  return row + "\n";
}

}  // namespace

std::string describe(const Slo& slo) {
  std::string text;
  const auto add = [&](const char* name, const std::optional<double>& limit_s) {
    if (limit_s) {
      text += fmt::format("{}{} <= {:g} ms", text.empty() ? "" : ", ", name, *limit_s * kMs);
    }
  };
  add("ttft", slo.ttft_s);
  add("tpot", slo.tpot_s);
  add("e2el", slo.e2e_s);
  return text;
}

std::string to_table(const LoadReport& report) {
  const LoadSummary& sum = report.summary;
  std::string out;
  for (const auto& [name, value] : report.setting) {
    out += fmt::format("{:<16} {}\n", name, value);
  }
  out += fmt::format("\n{:<16} {} completed, {} failed{} in {:.2f} s, {:.2f} a second\n",
                     "requests", sum.completed, sum.failed,
                     sum.not_sent > 0 ? fmt::format(", {} not sent", sum.not_sent) : "",
                     sum.duration_s, sum.requests_per_s);
  out += fmt::format("{:<16} {:.1f} tok/s ({} tokens)\n", "input", sum.input_tokens_per_s,
                     sum.input_tokens);
  out += fmt::format("{:<16} {:.1f} tok/s ({} tokens), peak {:.1f}\n", "output",
                     sum.output_tokens_per_s, sum.output_tokens, sum.peak_output_tokens_per_s);
  out += fmt::format("{:<16} {:.1f} tok/s\n", "input + output", sum.total_tokens_per_s);
  out += fmt::format("{:<16} mean {:.2f}, peak {}\n", "concurrency", sum.concurrency,
                     sum.peak_concurrency);
  out += fmt::format("{:<16} {}\n", "cached",
                     sum.cache_hit_rate
                         ? fmt::format("{:.1f} % of the prompt tokens", 100 * *sum.cache_hit_rate)
                         : "- (the server does not say)");
  if (sum.goodput_per_s) {
    out += fmt::format("{:<16} {:.2f} requests a second with {}\n", "goodput", *sum.goodput_per_s,
                       describe(report.slo));
  }
  out += fmt::format("\n{:<10}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}\n", "ms", "mean", "median",
                     "std", "P90", "P95", "P99", "max");
  out += distribution_row("TTFT", sum.ttft);
  out += distribution_row("TPOT", sum.tpot);
  out += distribution_row("ITL", sum.itl);
  out += distribution_row("E2E", sum.e2e);
  out += fmt::format("ITL: gaps per {}\n", report.has_exact_itl ? "token" : "chunk of the stream");
  if (!sum.errors.empty()) {
    out += "\nerrors\n";
  }
  for (const auto& [kind, group] : sum.errors) {
    out += fmt::format("  {:<18} {:>6}  {}\n", kind, group.count, group.example);
  }
  return out;
}

std::string to_json(const LoadReport& report) {
  const LoadSummary& sum = report.summary;
  OrderedJson json = OrderedJson::object();
  for (const auto& [name, value] : report.setting) {
    json["setting"][name] = value;
  }
  json["completed"] = sum.completed;
  json["failed"] = sum.failed;
  json["not_sent"] = sum.not_sent;
  json["duration"] = sum.duration_s;
  json["total_input_tokens"] = sum.input_tokens;
  json["total_output_tokens"] = sum.output_tokens;
  json["request_throughput"] = sum.requests_per_s;
  json["input_throughput"] = sum.input_tokens_per_s;
  json["output_throughput"] = sum.output_tokens_per_s;
  json["total_token_throughput"] = sum.total_tokens_per_s;
  json["max_output_tokens_per_s"] = sum.peak_output_tokens_per_s;
  json["concurrency"] = sum.concurrency;
  json["max_concurrent_requests"] = sum.peak_concurrency;
  json["request_goodput"] = nullptr;
  if (sum.goodput_per_s) {
    json["request_goodput"] = *sum.goodput_per_s;
    json["goodput_limits"] = describe(report.slo);
  }
  json["cache_hit_rate"] = nullptr;
  if (sum.cache_hit_rate) {
    json["cache_hit_rate"] = *sum.cache_hit_rate;
  }
  add_distribution(json, "ttft", sum.ttft);
  add_distribution(json, "tpot", sum.tpot);
  add_distribution(json, "itl", sum.itl);
  add_distribution(json, "e2el", sum.e2e);
  json["itl_unit"] = report.has_exact_itl ? "token" : "chunk";
  json["errors"] = OrderedJson::object();
  for (const auto& [kind, group] : sum.errors) {
    json["errors"][kind] = {{"count", group.count}, {"example", group.example}};
  }
  json["requests"] = OrderedJson::array();
  for (const RequestRecord& record : report.records) {
    json["requests"].push_back(json_of(record));
  }
  return json.dump(1, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
}

}  // namespace tandem::load
