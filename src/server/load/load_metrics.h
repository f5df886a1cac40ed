// load_metrics.h — what a client measures of a server: one record a request, and the figures over
// all of them. Pure arithmetic. Source of the definitions: spec serving.md 7.1.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"

namespace tandem::load {

/// The arrival of new text. Seconds since the run began.
struct TextEvent {
  double at_s = 0;
  double num_tokens = 1;  // exact for the native endpoint, 1 a chunk elsewhere
};

struct RequestRecord {
  double start_s = 0;             // before the request is sent
  double end_s = 0;               // last event
  std::vector<TextEvent> events;  // those with new text
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;
  std::optional<std::int64_t> cached_tokens;  // nullopt: the server does not say
  std::string error_kind;                     // empty: completed
  std::string error;                          // the whole message
  bool was_sent = true;

  [[nodiscard]] bool is_complete() const { return error_kind.empty(); }
  [[nodiscard]] double latency_s() const { return end_s - start_s; }
  /// nullopt: no event had text.
  [[nodiscard]] std::optional<double> ttft_s() const;
  /// Seconds a token after the first; nullopt for one token or without text.
  [[nodiscard]] std::optional<double> tpot_s() const;
  /// Gaps between events with text; one that brought m tokens counts as m gaps of its m-th part.
  void append_itls(std::vector<double>& itls_s) const;
};

/// `sorted` ascending and not empty; between ranks linear, as numpy does. `percent` in [0, 100].
[[nodiscard]] double percentile(std::span<const double> sorted, double percent);

/// Zeros when `count` is 0. The deviation is that of the values themselves (divided by count).
struct Distribution {
  std::int64_t count = 0;
  double mean = 0;
  double median = 0;
  double stddev = 0;
  double p90 = 0;
  double p95 = 0;
  double p99 = 0;
  double max = 0;
};
[[nodiscard]] Distribution distribution_of(std::vector<double> values);

/// Limits that a request must keep, in seconds; nullopt: any value will do.
struct Slo {
  std::optional<double> ttft_s;
  std::optional<double> tpot_s;
  std::optional<double> e2e_s;

  [[nodiscard]] bool is_set() const { return ttft_s || tpot_s || e2e_s; }
  /// A request with at most one output token has a TPOT of 0; one without text misses any TTFT.
  [[nodiscard]] bool is_kept(const RequestRecord& record) const;
};
/// From "ttft:200", "tpot:50", "e2el:5000" (milliseconds). Errors: a Failure that shows the word.
[[nodiscard]] Expected<Slo> parse_slo(std::span<const std::string> limits);

struct ErrorGroup {
  std::int64_t count = 0;
  std::string example;
};

/// Values of one kind, in seconds, one a request (ITL: one a gap).
struct Samples {
  std::vector<double> ttft_s;
  std::vector<double> tpot_s;
  std::vector<double> itl_s;
  std::vector<double> e2e_s;
};
/// Of the completed requests.
[[nodiscard]] Samples samples_of(std::span<const RequestRecord> records);

/// Rates are per second of `duration_s`, sums are over completed requests.
struct LoadSummary {
  std::int64_t completed = 0;
  std::int64_t failed = 0;
  std::int64_t not_sent = 0;  // the run was stopped, or an earlier turn failed
  double duration_s = 0;      // first request sent to last event
  std::int64_t input_tokens = 0;
  std::int64_t output_tokens = 0;
  std::optional<double> cache_hit_rate;  // cached part of the prompt tokens
  double requests_per_s = 0;
  double input_tokens_per_s = 0;
  double output_tokens_per_s = 0;
  double total_tokens_per_s = 0;
  double concurrency = 0;                    // sum of latencies / duration
  std::int64_t peak_concurrency = 0;         // most requests under way at one moment
  double peak_output_tokens_per_s = 0;       // best bucket of bucket_s
  std::optional<double> goodput_per_s;       // requests that keep all limits; nullopt: no limits
  Distribution ttft, tpot, itl, e2e;         // seconds
  std::map<std::string, ErrorGroup> errors;  // of the failed and those not sent, by kind
};
[[nodiscard]] LoadSummary summarize(std::span<const RequestRecord> records, const Slo& slo);

/// Output tokens a second and requests under way over time, from the first request on.
struct Timeline {
  double bucket_s = 1;
  std::vector<double> output_tokens_per_s;
  std::vector<double> running;  // mean over the bucket
};
/// Buckets of `bucket_s`, or one of the whole run if that is shorter.
[[nodiscard]] Timeline timeline_of(std::span<const RequestRecord> records, double bucket_s);

}  // namespace tandem::load
