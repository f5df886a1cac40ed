#include "server/metrics.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/checked_cast.h"

namespace tandem::server {
namespace {

std::vector<double> seconds_bounds() {
  return {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300};
}
std::vector<double> token_bounds() {
  return {1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576};
}

std::string escaped_label(const std::string& value) {
  std::string out;
  for (const char c : value) {
    if (c == '\\' || c == '"') {
      out += '\\';
    }
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

double share(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

/// Appends metrics one by one.
class Writer {
 public:
  explicit Writer(const std::string& model)
      : labels_("model_name=\"" + escaped_label(model) + '"') {}

  void gauge(const std::string& name, double value) { one(name, "gauge", value); }
  void counter(const std::string& name, std::uint64_t value) {
    one(name, "counter", static_cast<double>(value));
  }
  void histogram(const std::string& name, const Histogram& histogram) {
    text_ += "# TYPE " + name + " histogram\n";
    histogram.append_to(text_, name, labels_);
  }
  void family(const std::string& name, const std::string& label,
              const std::map<std::string, std::uint64_t>& values) {
    text_ += "# TYPE " + name + " counter\n";
    for (const auto& [key, value] : values) {
      text_ += fmt::format("{}{{{},{}=\"{}\"}} {}\n", name, labels_, label, key, value);
    }
  }
  std::string take() { return std::move(text_); }

 private:
  void one(const std::string& name, std::string_view type, double value) {
    text_ += fmt::format("# TYPE {0} {1}\n{0}{{{2}}} {3}\n", name, type, labels_, value);
  }
  std::string labels_;
  std::string text_;
};

}  // namespace

void Histogram::observe(double value) {
  const auto bucket = std::ranges::lower_bound(bounds_, value) - bounds_.begin();
  ++counts_[usize(bucket)];
  sum_ += value;
  ++count_;
}

void Histogram::append_to(std::string& text, const std::string& name,
                          const std::string& labels) const {
  std::uint64_t below = 0;
  for (std::size_t i = 0; i < bounds_.size(); ++i) {
    below += counts_[i];
    text += fmt::format("{}_bucket{{{},le=\"{}\"}} {}\n", name, labels, bounds_[i], below);
  }
  text +=
      fmt::format("{0}_bucket{{{1},le=\"+Inf\"}} {2}\n{0}_sum{{{1}}} {3}\n{0}_count{{{1}}} {2}\n",
                  name, labels, count_, sum_);
}

Metrics::Metrics()
    : first_token_s_(seconds_bounds()),
      between_tokens_s_(seconds_bounds()),
      end_to_end_s_(seconds_bounds()),
      queued_s_(seconds_bounds()),
      grammar_s_(seconds_bounds()),
      prompt_sizes_(token_bounds()),
      generation_sizes_(token_bounds()) {}

void Metrics::count_request() {
  const std::lock_guard lock(mutex_);
  ++num_requests_;
}

void Metrics::observe(const SampleRecord& sample) {
  const std::lock_guard lock(mutex_);
  prompt_tokens_ += static_cast<std::uint64_t>(sample.prompt_tokens);
  cached_tokens_ += static_cast<std::uint64_t>(sample.cached_tokens);
  generation_tokens_ += static_cast<std::uint64_t>(sample.completion_tokens);
  num_aborted_ += sample.finish_reason == "abort" ? 1U : 0U;
  num_retracted_ += static_cast<std::uint64_t>(sample.num_preemptions);
  ++finished_[sample.finish_reason];
  if (sample.prompt_tokens > 0) {
    prompt_sizes_.observe(static_cast<double>(sample.prompt_tokens));
  }
  generation_sizes_.observe(static_cast<double>(sample.completion_tokens));
  queued_s_.observe(sample.timing.queued_s);
  end_to_end_s_.observe(sample.timing.total_s);
  if (sample.completion_tokens > 0) {
    first_token_s_.observe(sample.timing.first_token_s);
  }
  if (sample.completion_tokens > 1) {
    between_tokens_s_.observe((sample.timing.total_s - sample.timing.first_token_s) /
                              static_cast<double>(sample.completion_tokens - 1));
  }
}

void Metrics::observe_grammar_compilation(double seconds) {
  const std::lock_guard lock(mutex_);
  grammar_s_.observe(seconds);
}

std::string Metrics::text(const LoopStats& stats, const EngineOptions& options,
                          const std::string& model_name) const {
  const std::lock_guard lock(mutex_);
  const EngineStats& engine = stats.engine;
  const std::int64_t page = stats.plan.page_size;
  const std::int64_t all_tokens = stats.plan.num_pages * page;
  // What the prefix cache holds can be had at once.
  const std::int64_t cached_tokens = engine.num_cached_pages * page;
  const std::int64_t free_tokens = (engine.num_free_pages + engine.num_cached_pages) * page;
  const double kv_usage = share(all_tokens - free_tokens, all_tokens);
  const double state_usage =
      share(stats.plan.num_slots - engine.num_free_slots, stats.plan.num_slots);
  const auto gib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
  Writer out(model_name);
  const auto gauge = [&](const std::string& name, auto value) {
    out.gauge(name, static_cast<double>(value));
  };
  gauge("sglang:num_running_reqs", engine.num_running);
  gauge("sglang:num_queue_reqs", engine.num_waiting);
  gauge("sglang:num_paused_reqs", stats.is_paused ? stats.num_unfinished : 0);
  gauge("sglang:num_used_tokens", all_tokens - free_tokens);
  gauge("sglang:kv_used_tokens", all_tokens - free_tokens);
  gauge("sglang:kv_available_tokens", free_tokens);
  gauge("sglang:kv_evictable_tokens", cached_tokens);
  gauge("sglang:token_usage", std::max(kv_usage, state_usage));
  gauge("sglang:full_token_usage", kv_usage);
  gauge("sglang:mamba_usage", state_usage);
  gauge("sglang:cache_hit_rate", share(static_cast<std::int64_t>(cached_tokens_),
                                       static_cast<std::int64_t>(prompt_tokens_)));
  gauge("sglang:gen_throughput", stats.tokens_per_s);
  gauge("sglang:max_total_num_tokens", all_tokens);
  gauge("sglang:page_size", page);
  gauge("sglang:num_pages", stats.plan.num_pages);
  gauge("sglang:context_len", options.max_seq_len);
  gauge("sglang:weight_memory_usage_gb", gib(stats.plan.weight_bytes));
  gauge("sglang:kv_cache_memory_usage_gb", gib(stats.plan.num_pages * stats.plan.page_bytes +
                                               stats.plan.num_slots * stats.plan.slot_bytes));
  out.counter("sglang:prompt_tokens_total", prompt_tokens_);
  out.counter("sglang:generation_tokens_total", generation_tokens_);
  out.counter("sglang:cached_tokens_total", cached_tokens_);
  out.counter("sglang:num_requests_total", num_requests_);
  out.counter("sglang:num_aborted_requests_total", num_aborted_);
  out.counter("sglang:num_retracted_requests_total", num_retracted_);
  out.histogram("sglang:time_to_first_token_seconds", first_token_s_);
  out.histogram("sglang:inter_token_latency_seconds", between_tokens_s_);
  out.histogram("sglang:e2e_request_latency_seconds", end_to_end_s_);
  out.histogram("sglang:queue_time_seconds", queued_s_);
  out.histogram("sglang:grammar_compilation_time_seconds", grammar_s_);
  out.histogram("sglang:prompt_tokens_histogram", prompt_sizes_);
  out.histogram("sglang:generation_tokens_histogram", generation_sizes_);
  gauge("vllm:num_requests_running", engine.num_running);
  gauge("vllm:num_requests_waiting", engine.num_waiting);
  gauge("vllm:kv_cache_usage_perc", kv_usage);
  out.counter("vllm:num_preemptions_total", static_cast<std::uint64_t>(engine.num_preemptions));
  out.counter("vllm:prompt_tokens_total", prompt_tokens_);
  out.counter("vllm:generation_tokens_total", generation_tokens_);
  out.counter("vllm:prefix_cache_queries_total", prompt_tokens_);
  out.counter("vllm:prefix_cache_hits_total", cached_tokens_);
  out.family("vllm:request_success_total", "finished_reason", finished_);
  out.histogram("vllm:time_to_first_token_seconds", first_token_s_);
  out.histogram("vllm:request_time_per_output_token_seconds", between_tokens_s_);
  out.histogram("vllm:e2e_request_latency_seconds", end_to_end_s_);
  out.histogram("vllm:request_queue_time_seconds", queued_s_);
  out.histogram("vllm:request_prompt_tokens", prompt_sizes_);
  out.histogram("vllm:request_generation_tokens", generation_sizes_);
  // What was not computed again, and where rows were there but no state to go on from.
  out.family("tandem:prefix_match_tokens_total", "kind",
             {{"kv", static_cast<std::uint64_t>(engine.prefix.kv_tokens)},
              {"state", static_cast<std::uint64_t>(engine.prefix.state_tokens)}});
  return out.take();
}

}  // namespace tandem::server
