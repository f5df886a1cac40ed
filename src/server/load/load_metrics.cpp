#include "server/load/load_metrics.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem::load {
namespace {

/// First request sent and last event of all; zeros when none was sent.
std::pair<double, double> span_of(std::span<const RequestRecord> records) {
  std::optional<std::pair<double, double>> span;
  for (const RequestRecord& record : records) {
    if (record.was_sent) {
      span = span ? std::pair(std::min(span->first, record.start_s),
                              std::max(span->second, record.end_s))
                  : std::pair(record.start_s, record.end_s);
    }
  }
  return span.value_or(std::pair(0.0, 0.0));
}

/// Tokens an event stands for: where events do not say, all of them share the server's count.
double tokens_a_unit(const RequestRecord& record) {
  double units = 0;
  for (const TextEvent& event : record.events) {
    units += event.num_tokens;
  }
  return units > 0 ? static_cast<double>(record.output_tokens) / units : 0;
}

std::int64_t peak_concurrency(std::span<const RequestRecord> records) {
  std::vector<std::pair<double, int>> changes;
  for (const RequestRecord& record : records) {
    if (record.was_sent) {
      changes.emplace_back(record.start_s, 1);
      changes.emplace_back(record.end_s, -1);
    }
  }
  std::ranges::sort(changes);  // at the same moment an end comes before a start
  std::int64_t running = 0;
  std::int64_t most = 0;
  for (const auto& [at, change] : changes) {
    running += change;
    most = std::max(most, running);
  }
  return most;
}

}  // namespace

std::optional<double> RequestRecord::ttft_s() const {
  return events.empty() ? std::nullopt : std::optional(events.front().at_s - start_s);
}

std::optional<double> RequestRecord::tpot_s() const {
  const auto ttft = ttft_s();
  if (!ttft || output_tokens <= 1) {
    return std::nullopt;
  }
  return (latency_s() - *ttft) / static_cast<double>(output_tokens - 1);
}

void RequestRecord::append_itls(std::vector<double>& itls_s) const {
  for (std::size_t i = 1; i < events.size(); ++i) {
    const double gap = events[i].at_s - events[i - 1].at_s;
    const auto parts = std::max<std::int64_t>(1, std::llround(events[i].num_tokens));
    itls_s.insert(itls_s.end(), usize(parts), gap / static_cast<double>(parts));
  }
}

double percentile(std::span<const double> sorted, double percent) {
  TDM_CHECK(!sorted.empty());
  const double rank = percent / 100 * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(rank);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (rank - static_cast<double>(below));
}

Distribution distribution_of(std::vector<double> values) {
  Distribution out;
  if (values.empty()) {
    return out;
  }
  std::ranges::sort(values);
  const auto count = static_cast<double>(values.size());
  out.count = isize(values);
  out.mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const double value : values) {
    squares += (value - out.mean) * (value - out.mean);
  }
  out.stddev = std::sqrt(squares / count);
  out.median = percentile(values, 50);
  out.p90 = percentile(values, 90);
  out.p95 = percentile(values, 95);
  out.p99 = percentile(values, 99);
  out.max = values.back();
  return out;
}

bool Slo::is_kept(const RequestRecord& record) const {
  const auto ttft = record.ttft_s();
  return record.is_complete() && (!ttft_s || (ttft && *ttft <= *ttft_s)) &&
         (!tpot_s || record.tpot_s().value_or(0) <= *tpot_s) &&
         (!e2e_s || record.latency_s() <= *e2e_s);
}

Expected<Slo> parse_slo(std::span<const std::string> limits) {
  Slo slo;
  for (const std::string& word : limits) {
    const std::size_t colon = std::min(word.find(':'), word.size());
    const std::string_view name = std::string_view(word).substr(0, colon);
    const std::string_view number = std::string_view(word).substr(std::min(colon + 1, word.size()));
    double ms = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), ms);
    std::optional<double>* limit = name == "ttft"   ? &slo.ttft_s
                                   : name == "tpot" ? &slo.tpot_s
                                   : name == "e2el" ? &slo.e2e_s
                                                    : nullptr;
    if (limit == nullptr || error != std::errc() || end != number.data() + number.size() ||
        !std::isfinite(ms) || ms < 0) {
      return fail("--goodput '{}': expected ttft:MS, tpot:MS or e2el:MS with MS >= 0", word);
    }
    if (*limit) {
      return fail("--goodput '{}': {} is there twice", word, name);
    }
    *limit = ms / 1000;
  }
  return slo;
}

Samples samples_of(std::span<const RequestRecord> records) {
  Samples samples;
  for (const RequestRecord& record : records) {
    if (!record.is_complete()) {
      continue;
    }
    samples.e2e_s.push_back(record.latency_s());
    if (const auto ttft = record.ttft_s()) {
      samples.ttft_s.push_back(*ttft);
    }
    if (const auto tpot = record.tpot_s()) {
      samples.tpot_s.push_back(*tpot);
    }
    record.append_itls(samples.itl_s);
  }
  return samples;
}

LoadSummary summarize(std::span<const RequestRecord> records, const Slo& slo) {
  LoadSummary out;
  const auto [first, last] = span_of(records);
  out.duration_s = last - first;
  std::int64_t cached = 0;
  std::int64_t asked_of_cache = 0;  // prompt tokens of requests whose server says what was cached
  std::int64_t kept = 0;
  double latencies = 0;
  for (const RequestRecord& record : records) {
    if (!record.is_complete()) {
      ++(record.was_sent ? out.failed : out.not_sent);
      ErrorGroup& group = out.errors[record.error_kind];
      if (group.count++ == 0) {
        group.example = record.error;
      }
      continue;
    }
    ++out.completed;
    out.input_tokens += record.prompt_tokens;
    out.output_tokens += record.output_tokens;
    latencies += record.latency_s();
    kept += slo.is_kept(record) ? 1 : 0;
    if (record.cached_tokens) {
      cached += *record.cached_tokens;
      asked_of_cache += record.prompt_tokens;
    }
  }
  if (asked_of_cache > 0) {
    out.cache_hit_rate = static_cast<double>(cached) / static_cast<double>(asked_of_cache);
  }
  const auto rate = [&](auto count) {
    return out.duration_s > 0 ? static_cast<double>(count) / out.duration_s : 0.0;
  };
  out.requests_per_s = rate(out.completed);
  out.input_tokens_per_s = rate(out.input_tokens);
  out.output_tokens_per_s = rate(out.output_tokens);
  out.total_tokens_per_s = rate(out.input_tokens + out.output_tokens);
  out.concurrency = rate(latencies);
  out.peak_concurrency = peak_concurrency(records);
  for (const double tokens_per_s : timeline_of(records, 1).output_tokens_per_s) {
    out.peak_output_tokens_per_s = std::max(out.peak_output_tokens_per_s, tokens_per_s);
  }
  if (slo.is_set()) {
    out.goodput_per_s = rate(kept);
  }
  Samples samples = samples_of(records);
  out.ttft = distribution_of(std::move(samples.ttft_s));
  out.tpot = distribution_of(std::move(samples.tpot_s));
  out.itl = distribution_of(std::move(samples.itl_s));
  out.e2e = distribution_of(std::move(samples.e2e_s));
  return out;
}

Timeline timeline_of(std::span<const RequestRecord> records, double bucket_s) {
  Timeline line;
  const auto [first, last] = span_of(records);
  if (last <= first) {
    return line;
  }
  line.bucket_s = std::min(bucket_s, last - first);
  const auto num_buckets =
      std::max<std::size_t>(1, static_cast<std::size_t>(std::ceil((last - first) / line.bucket_s)));
  line.output_tokens_per_s.resize(num_buckets);
  line.running.resize(num_buckets);
  const auto bucket_of = [&, begin = first](double at_s) {
    return std::min(static_cast<std::size_t>((at_s - begin) / line.bucket_s), num_buckets - 1);
  };
  for (const RequestRecord& record : records) {
    if (!record.was_sent) {
      continue;
    }
    const double share = record.is_complete() ? tokens_a_unit(record) : 0;
    for (const TextEvent& event : record.events) {
      line.output_tokens_per_s[bucket_of(event.at_s)] += event.num_tokens * share / line.bucket_s;
    }
    for (std::size_t b = bucket_of(record.start_s); b <= bucket_of(record.end_s); ++b) {
      const double begin = first + static_cast<double>(b) * line.bucket_s;
      const double overlap =
          std::min(record.end_s, begin + line.bucket_s) - std::max(record.start_s, begin);
      line.running[b] += std::max(0.0, overlap) / line.bucket_s;
    }
  }
  return line;
}

}  // namespace tandem::load
