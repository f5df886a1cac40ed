// The arithmetic of a measured load, on events whose figures can be worked out by hand.
#include "server/load/load_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem::load {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kNear = 1e-12;

RequestRecord record(double start_s, double end_s, std::vector<TextEvent> events,
                     std::int64_t output_tokens) {
  RequestRecord made;
  made.start_s = start_s;
  made.end_s = end_s;
  made.events = std::move(events);
  made.prompt_tokens = 10;
  made.output_tokens = output_tokens;
  return made;
}

/// Three that completed, one that failed, one that was never sent.
std::vector<RequestRecord> fixed_records() {
  std::vector<RequestRecord> records = {
      record(0.0, 0.5, {{0.1, 1}, {0.2, 1}, {0.4, 1}}, 5),
      record(1.0, 1.9, {{1.3, 1}, {1.9, 3}}, 4),
      record(0.5, 0.7, {{0.7, 1}}, 1),
      record(1.5, 2.0, {{1.6, 1}}, 1),
      record(0.0, 0.0, {}, 0),
  };
  records[1].cached_tokens = 4;
  records[2].cached_tokens = 0;
  records[3].error_kind = "http_429";
  records[3].error = "HTTP 429: full";
  records[4].error_kind = "not_sent";
  records[4].was_sent = false;
  return records;
}

TEST(LoadMetrics, TimesOfARequest) {
  const auto records = fixed_records();
  EXPECT_NEAR(records[0].ttft_s().value(), 0.1, kNear);
  EXPECT_NEAR(records[0].tpot_s().value(), 0.1, kNear);
  EXPECT_NEAR(records[0].latency_s(), 0.5, kNear);
  EXPECT_NEAR(records[1].tpot_s().value(), 0.2, kNear);
  EXPECT_FALSE(records[2].tpot_s());           // one token
  EXPECT_FALSE(record(0, 1, {}, 7).ttft_s());  // no text
  EXPECT_FALSE(record(0, 1, {}, 7).tpot_s());
  std::vector<double> itls;
  records[0].append_itls(itls);
  EXPECT_THAT(itls, ElementsAre(DoubleNear(0.1, kNear), DoubleNear(0.2, kNear)));
  itls.clear();
  records[1].append_itls(itls);  // three tokens at once share the gap
  EXPECT_THAT(itls,
              ElementsAre(DoubleNear(0.2, kNear), DoubleNear(0.2, kNear), DoubleNear(0.2, kNear)));
}

TEST(LoadMetrics, PercentilesAsNumpy) {
  const std::vector<double> sorted{1, 2, 3, 4};
  EXPECT_NEAR(percentile(sorted, 0), 1, kNear);
  EXPECT_NEAR(percentile(sorted, 50), 2.5, kNear);
  EXPECT_NEAR(percentile(sorted, 90), 3.7, kNear);
  EXPECT_NEAR(percentile(sorted, 99), 3.97, kNear);
  EXPECT_NEAR(percentile(sorted, 100), 4, kNear);
  const Distribution four = distribution_of({4, 1, 3, 2});
  EXPECT_EQ(four.count, 4);
  EXPECT_NEAR(four.mean, 2.5, kNear);
  EXPECT_NEAR(four.stddev, 1.118033988749895, kNear);  // numpy.std([1, 2, 3, 4])
  EXPECT_NEAR(four.p95, 3.85, kNear);
  EXPECT_EQ(four.max, 4);
  EXPECT_EQ(distribution_of({}).count, 0);
  EXPECT_EQ(distribution_of({5}).p99, 5);
}

TEST(LoadMetrics, SumsAndRates) {
  const LoadSummary sum = summarize(fixed_records(), {});
  EXPECT_EQ(sum.completed, 3);
  EXPECT_EQ(sum.failed, 1);
  EXPECT_EQ(sum.not_sent, 1);
  EXPECT_NEAR(sum.duration_s, 2.0, kNear);  // the failed request ends last
  EXPECT_EQ(sum.input_tokens, 30);
  EXPECT_EQ(sum.output_tokens, 10);
  EXPECT_NEAR(sum.requests_per_s, 1.5, kNear);
  EXPECT_NEAR(sum.input_tokens_per_s, 15, kNear);
  EXPECT_NEAR(sum.output_tokens_per_s, 5, kNear);
  EXPECT_NEAR(sum.total_tokens_per_s, 20, kNear);
  EXPECT_NEAR(sum.concurrency, (0.5 + 0.9 + 0.2) / 2.0, kNear);
  EXPECT_EQ(sum.peak_concurrency, 2);                        // the first ends as the third begins
  EXPECT_NEAR(sum.cache_hit_rate.value(), 4.0 / 20, kNear);  // of those that report it
  EXPECT_NEAR(sum.itl.mean, 0.18, kNear);
  EXPECT_EQ(sum.itl.count, 5);
  EXPECT_NEAR(sum.itl.max, 0.2, kNear);
  EXPECT_EQ(sum.tpot.count, 2);
  EXPECT_FALSE(sum.goodput_per_s);
  EXPECT_EQ(sum.errors.at("http_429").count, 1);
  EXPECT_EQ(sum.errors.at("http_429").example, "HTTP 429: full");
}

TEST(LoadMetrics, PeakIsTheBestSecond) {
  const auto records = fixed_records();
  // Until 1 s: five tokens of the first, one of the third; then four of the second.
  EXPECT_NEAR(summarize(records, {}).peak_output_tokens_per_s, 6, kNear);
  const Timeline line = timeline_of(records, 1);
  EXPECT_THAT(line.output_tokens_per_s, ElementsAre(DoubleNear(6, kNear), DoubleNear(4, kNear)));
  EXPECT_THAT(line.running, ElementsAre(DoubleNear(0.7, kNear), DoubleNear(1.4, kNear)));
  // A run shorter than a bucket is a bucket of its own length.
  const std::vector<RequestRecord> brief{record(3, 3.5, {{3.2, 1}}, 10)};
  EXPECT_NEAR(summarize(brief, {}).peak_output_tokens_per_s, 20, kNear);
  EXPECT_TRUE(timeline_of({}, 1).running.empty());
  EXPECT_EQ(summarize({}, {}).requests_per_s, 0);
}

TEST(LoadMetrics, GoodputNeedsAllLimits) {
  const auto records = fixed_records();
  const auto kept_per_s = [&](std::vector<std::string> limits) {
    return summarize(records, parse_slo(limits).value_or_throw()).goodput_per_s.value();
  };
  EXPECT_NEAR(kept_per_s({"ttft:201"}), 2 / 2.0, kNear);
  EXPECT_NEAR(kept_per_s({"ttft:1000", "tpot:150"}), 2 / 2.0, kNear);  // one token: TPOT 0
  EXPECT_NEAR(kept_per_s({"e2el:300"}), 1 / 2.0, kNear);
  EXPECT_NEAR(kept_per_s({"ttft:150", "tpot:150", "e2el:5000"}), 1 / 2.0, kNear);
  EXPECT_NEAR(kept_per_s({"ttft:1"}), 0, kNear);
  const Slo slo = parse_slo(std::vector<std::string>{"ttft:5000"}).value_or_throw();
  EXPECT_FALSE(slo.is_kept(record(0, 1, {}, 5)));  // without text there is no first token
}

TEST(LoadMetrics, BadLimitsAreShown) {
  for (const char* word : {"ttft", "ttft:", "ttft:x", "ttft:-1", "p99:3", "tpot:1ms", "ttft:nan"}) {
    const auto slo = parse_slo(std::vector<std::string>{word});
    ASSERT_FALSE(slo) << word;
    EXPECT_THAT(slo.message(), HasSubstr(word));
    EXPECT_THAT(slo.message(), HasSubstr("expected ttft:MS"));
  }
  EXPECT_THAT(parse_slo(std::vector<std::string>{"ttft:1", "ttft:2"}).message(),
              HasSubstr("twice"));
}

}  // namespace
}  // namespace tandem::load
