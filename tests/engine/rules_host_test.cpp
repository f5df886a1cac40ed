// Rules, alternatives and scores on a device with memory of its own, and what they cost there.
#include "rule_requests.h"
#include "support/fake_device.h"

namespace tandem::test {
namespace {

TEST(Rules, OnADeviceToo) {
  FakeDevice device;
  Rig rig;
  rig.ctx.device = &device;
  const auto engine = rig.engine(small_options());
  const std::int64_t allocations = device.counters().allocations;
  expect_all_with_rules(rig, *engine, requests_with_rules(24));
  expect_all_with_rules(rig, *engine, requests_with_rules(24), 3);
  EXPECT_EQ(device.counters().allocations, allocations);
  EXPECT_EQ(device.memory()->allocated,
            engine->memory_plan().total_bytes() - engine->memory_plan().weight_bytes);
}

/// What a device was asked for by one decode of `request` beside a plain one.
DeviceCounters counters_of_a_decode(const Request& request) {
  FakeDevice device;
  Rig rig;
  rig.ctx.device = &device;
  const auto engine = rig.engine(small_options());
  Request plain = make_request(5, 20, 1);
  plain.want_routed_experts = false;
  EXPECT_TRUE(engine->submit(plain).ok());
  EXPECT_TRUE(engine->submit(request).ok());
  for (int i = 0; i < 5; ++i) {  // prompts, then steps that are run and recorded
    engine->step();
  }
  const DeviceCounters before = device.counters();
  engine->step();
  const DeviceCounters after = device.counters();
  return {.uploads = after.uploads - before.uploads,
          .downloads = after.downloads - before.downloads,
          .launches = after.launches - before.launches,
          .recorded_launches = after.recorded_launches - before.recorded_launches};
}

TEST(Rules, OnlyStepsWithRulesPayForThem) {
  Request request = make_request(5, 20, 2);
  request.want_routed_experts = false;
  const DeviceCounters plain = counters_of_a_decode(request);
  EXPECT_EQ(plain.recorded_launches, 1);
  EXPECT_EQ(plain.launches, 0);
  EXPECT_EQ(plain.uploads, 2);
  EXPECT_EQ(plain.downloads, 1);
  Request with_rules = request;
  with_rules.rules.presence_penalty = 0.5F;
  const DeviceCounters rules = counters_of_a_decode(with_rules);
  EXPECT_EQ(rules.recorded_launches, 1);  // the model's part is launched as it was recorded
  EXPECT_EQ(rules.launches, 1);           // the copy (the fake does not see ops)
  EXPECT_EQ(rules.uploads, 3);
  EXPECT_EQ(rules.downloads, 1);
  Request with_top = request;
  with_top.num_top_logprobs = 2;
  const DeviceCounters top = counters_of_a_decode(with_top);
  EXPECT_EQ(top.recorded_launches, 1);
  EXPECT_EQ(top.downloads, 2);
}

TEST(Constraint, ADeadEndOnADeviceFailsItsRequestOnly) {
  FakeDevice device;
  Rig rig;
  rig.ctx.device = &device;
  expect_dead_ends(rig);
}

TEST(PromptLogprobs, OnADeviceToo) {
  FakeDevice device;
  Rig rig;
  rig.ctx.device = &device;
  const auto engine = rig.engine(small_options());
  const std::int64_t allocations = device.counters().allocations;
  expect_all_as_alone(rig, *engine, scored_requests(24));
  EXPECT_EQ(device.counters().allocations, allocations);
}

}  // namespace
}  // namespace tandem::test
