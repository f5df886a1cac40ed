// metrics.h — counters and histograms of the server in Prometheus text, under the names that SGLang
// and vLLM use, so that existing dashboards work. Source: spec serving.md 1.9.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/engine_loop.h"

namespace tandem::server {

/// Counts of values up to each bound, as Prometheus has them.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)) {
    counts_.resize(bounds_.size() + 1);
  }
  void observe(double value);
  /// NAME_bucket, NAME_sum and NAME_count. `labels` as in {a="b"}, without braces.
  void append_to(std::string& text, const std::string& name, const std::string& labels) const;

 private:
  std::vector<double> bounds_;  // rising; above the last is one more bucket
  std::vector<std::uint64_t> counts_;
  double sum_ = 0;
  std::uint64_t count_ = 0;
};

/// One finished sample.
struct SampleRecord {
  std::int64_t prompt_tokens = 0;  // 0 for all but the first sample of a prompt
  std::int64_t cached_tokens = 0;
  std::int64_t completion_tokens = 0;
  std::string finish_reason;  // "stop", "length", "tool_calls", "abort", "error"
  RequestTiming timing;
  std::int64_t num_preemptions = 0;
};

/// Safe to use from any thread.
class Metrics {
 public:
  Metrics();
  void count_request();
  void observe(const SampleRecord& sample);
  void observe_grammar_compilation(double seconds);
  [[nodiscard]] std::string text(const LoopStats& stats, const EngineOptions& options,
                                 const std::string& model_name) const;

 private:
  mutable std::mutex mutex_;  // guards all below
  std::uint64_t num_requests_ = 0;
  std::uint64_t num_aborted_ = 0;
  std::uint64_t num_retracted_ = 0;
  std::uint64_t prompt_tokens_ = 0;
  std::uint64_t cached_tokens_ = 0;
  std::uint64_t generation_tokens_ = 0;
  std::map<std::string, std::uint64_t> finished_;  // by reason
  Histogram first_token_s_;
  Histogram between_tokens_s_;
  Histogram end_to_end_s_;
  Histogram queued_s_;
  Histogram grammar_s_;
  Histogram prompt_sizes_;
  Histogram generation_sizes_;
};

}  // namespace tandem::server
