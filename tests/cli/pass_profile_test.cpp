// What `tandem bench kernels` makes of op calls and traces, with made-up times.
#include "cli/pass_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem::cli {
namespace {

using Kind = TraceEvent::Kind;
using ::testing::HasSubstr;

Profiler::Call call(const char* op, std::int64_t launches, OpWork work) {
  return {op, std::move(work), launches, 1e-6};
}

/// An embedding, a product, two layers of experts, attention, and a head: 8 launches.
std::vector<Profiler::Call> some_calls() {
  return {call("embed", 1, {.shape = "2 x 4", .bytes = 100}),
          call("linear", 1, {.shape = "2 x 4 -> 8", .bytes = 1000, .flops = 4000}),
          call("experts", 2, {.shape = "2 x 4", .bytes = 10, .bytes_per_expert = 100}),
          call("experts", 1, {.shape = "2 x 4", .bytes = 10, .bytes_per_expert = 100}),
          call("kda_decode", 0, {.shape = "not done", .bytes = 1000}),
          call("mla_absorbed", 1, {.shape = "q", .bytes_per_key = 7, .flops_per_pair = 3}),
          call("embed", 1, {.shape = "2 x 4", .bytes = 5}),
          call("linear", 1, {.shape = "2 x 4 -> 9", .bytes = 500})};
}

const PassData kData{.experts = {3, 5}, .keys = 11, .pairs = 13};
const Roofs kRoofs{.bytes_per_s = 1e9, .flops_per_s = 1e9};  // a byte or an operation a nanosecond

/// One kernel after the other, `each_ns` long; every second one is resident 100 ns early.
std::vector<TraceEvent> trace_of(std::int64_t kernels, std::int64_t each_ns) {
  std::vector<TraceEvent> events{{Kind::kCall, "cudaGraphLaunch", 0, 500, 0}};
  for (std::int64_t i = 0; i < kernels; ++i) {
    const std::int64_t start = 1000 + i * each_ns;
    events.push_back({i == 3 ? Kind::kCopy : Kind::kKernel, i % 2 == 0 ? "k0" : "k1",
                      start - 100 * (i % 2), start + each_ns, 0});
  }
  events.push_back({Kind::kCall, "cudaStreamSynchronize", 600, 99'000, 0});
  return events;
}

TEST(PassProfile, GivesEachCallItsKernelsAndItsRoof) {
  const std::vector<std::vector<TraceEvent>> traces{trace_of(8, 2000), trace_of(8, 9000),
                                                    trace_of(8, 1000)};
  const PassProfile profile = make_profile(some_calls(), kData, kRoofs, traces);
  EXPECT_EQ(profile.problem, "");
  ASSERT_EQ(profile.kernels.size(), 8U);
  EXPECT_EQ(profile.kernels[3].call, 2U);
  EXPECT_DOUBLE_EQ(profile.kernels[3].us, 2.0);  // the median; early residence does not count
  EXPECT_DOUBLE_EQ(profile.kernels[3].resident_us, 2.1);
  EXPECT_DOUBLE_EQ(profile.us, 16.0);
  ASSERT_EQ(profile.calls.size(), 7U);
  EXPECT_DOUBLE_EQ(profile.calls[1].us, 2.0);
  EXPECT_DOUBLE_EQ(profile.calls[1].roof_us, 4.0);  // operations weigh more than bytes
  EXPECT_DOUBLE_EQ(profile.calls[2].us, 4.0);
  EXPECT_DOUBLE_EQ(profile.calls[2].bytes, 310.0);  // three experts of the first layer
  EXPECT_DOUBLE_EQ(profile.calls[3].bytes, 510.0);
  EXPECT_DOUBLE_EQ(profile.calls[4].bytes, 77.0);
  EXPECT_DOUBLE_EQ(profile.calls[4].flops, 39.0);
  EXPECT_EQ(profile.calls[0].part, "embedding");
  EXPECT_EQ(profile.calls[1].part, "linear");
  EXPECT_EQ(profile.calls[4].part, "attention");
  EXPECT_EQ(profile.calls[5].part, "head");
  EXPECT_EQ(profile.calls[6].part, "head");
  EXPECT_EQ(count_names(profile.host_calls), "cudaGraphLaunch, cudaStreamSynchronize");
}

TEST(PassProfile, SaysWhenKernelsAndLaunchesDoNotMatch) {
  const std::vector<std::vector<TraceEvent>> traces{trace_of(7, 1000)};
  const PassProfile profile = make_profile(some_calls(), kData, kRoofs, traces);
  EXPECT_THAT(profile.problem, HasSubstr("8 launches"));
  EXPECT_THAT(profile.problem, HasSubstr("7 kernels"));
  EXPECT_EQ(profile.kernels.size(), 7U);
  EXPECT_THAT(to_table(profile), HasSubstr(profile.problem));
  const std::vector<std::vector<TraceEvent>> unequal{trace_of(8, 1000), trace_of(6, 1000)};
  EXPECT_THAT(make_profile(some_calls(), kData, kRoofs, unequal).problem, HasSubstr("8 and 6"));
}

TEST(PassProfile, KeepsTheHostsTimesWithoutATrace) {
  const std::vector<std::vector<TraceEvent>> traces(3);
  const PassProfile profile = make_profile(some_calls(), kData, kRoofs, traces);
  EXPECT_TRUE(profile.kernels.empty());
  EXPECT_NEAR(profile.us, 8.0, 1e-9);
  EXPECT_NEAR(profile.calls[2].us, 1.0, 1e-9);
}

TEST(PassProfile, TablesHoldPartsOpsKernelsAndTheSum) {
  const std::vector<std::vector<TraceEvent>> traces{trace_of(8, 2000)};
  const PassProfile profile = make_profile(some_calls(), kData, kRoofs, traces);
  const std::string table = to_table(profile);
  for (const char* text : {"experts 2 x 4", "head", "attention", "experts: k0", "sum of roofs",
                           "cudaGraphLaunch", "% roof"}) {
    EXPECT_THAT(table, HasSubstr(text));
  }
  const nlohmann::ordered_json json = to_json(profile);
  EXPECT_EQ(json["calls"].size(), 7U);
  EXPECT_EQ(json["kernels"].size(), 8U);
  EXPECT_EQ(json["launches"], 8);
  EXPECT_DOUBLE_EQ(json["us"].get<double>(), 16.0);
  double parts = 0;
  for (const auto& part : json["parts"]) {
    parts += part["us"].get<double>();
  }
  EXPECT_DOUBLE_EQ(parts, 16.0);
}

}  // namespace
}  // namespace tandem::cli
