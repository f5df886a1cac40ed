// The engine on a device with memory of its own, as on a GPU: padded and recorded decode steps,
// planned memory, and what happens when it is not enough.
#include <filesystem>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "engine/warm_up.h"
#include "engine_rig.h"
#include "models/kimi_k3/init.h"
#include "models/registry.h"
#include "snapshot_rig.h"
#include "support/fake_device.h"

namespace tandem::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Its context's workspace stays the host's: what a test computes without the engine uses it.
struct FakeRig : Rig {
  explicit FakeRig(FakeDevice& fake) { ctx.device = &fake; }
};

TEST(FakeDevice, RequestsGetWhatTheyGetAlone) {
  FakeDevice device;
  FakeRig rig(device);
  const auto engine = rig.engine(small_options());
  expect_all_as_alone(rig, *engine, mixed_requests(24));
  expect_all_as_alone(rig, *engine, mixed_requests(24));  // most steps are replays by now
  EXPECT_GT(device.counters().recorded_launches, 10);
}

TEST(FakeDevice, PreemptedAndGroupedRequestsToo) {
  FakeDevice device;
  FakeRig rig(device);
  EngineOptions options = small_options();
  options.num_pages = 18;  // two sequences' worth for six
  const auto engine = rig.engine(options);
  expect_all_as_alone(rig, *engine, mixed_requests(30));
  EXPECT_GT(engine->stats().num_preemptions, 0);
  const Request request = make_request(9, 12, 40);
  const auto ids = engine->submit_group(request, 5).value_or_throw();
  engine->run_until_idle();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Request one = request;
    one.sequence_id += i;
    EXPECT_TRUE(
        same_output(engine->take_output(ids[i]).value_or_throw(), expected_output(rig, one)));
  }
}

TEST(FakeDevice, CachedPrefixesAndTheirGroupsToo) {
  FakeDevice device;
  FakeRig rig(device);
  const auto engine = rig.engine(cached_options());
  const std::vector<std::int32_t> prefix = random_tokens(33, 1);
  std::vector<Request> requests;
  for (std::uint64_t i = 0; i < 12; ++i) {
    requests.push_back(
        cacheable_request(longer(prefix, static_cast<std::int64_t>(i) % 5, i), 9, i));
  }
  expect_all_as_alone(rig, *engine, requests);
  expect_all_as_alone(rig, *engine, requests);
  EXPECT_GT(engine->stats().prefix.num_hits, 10);
  // One row is left of this prompt, and the group forks after it.
  const Request request = cacheable_request(prefix, 6, 40);
  const auto ids = engine->submit_group(request, 5).value_or_throw();
  engine->run_until_idle();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Request one = request;
    one.sequence_id += i;
    EXPECT_TRUE(
        same_output(engine->take_output(ids[i]).value_or_throw(), expected_output(rig, one)));
  }
  EXPECT_EQ(engine->stats().num_forks, 4);
}

TEST(FakeDevice, ASavedPrefixCacheIsTheHostsAndComesBack) {
  FakeDevice device;
  FakeRig rig(device);
  Rig host_rig;
  const Request request = cacheable_request(random_tokens(33, 1), 5, 1);
  const auto engine = rig.engine(cached_options());
  const auto on_host = host_rig.engine(cached_options());
  EXPECT_TRUE(same_output(run_one(*engine, request), run_one(*on_host, request)));
  const std::vector<std::byte> bytes = saved(*engine);
  EXPECT_EQ(bytes, saved(*on_host));
  const auto next = rig.engine(cached_options());
  ASSERT_TRUE(load(*next, bytes).ok());
  const RequestOutput output = run_one(*next, request);
  EXPECT_TRUE(same_output(output, expected_output(rig, request)));
  EXPECT_EQ(output.cached_tokens, 32);
  std::vector<std::byte> bad = bytes;
  bad[bad.size() - 20] ^= std::byte{4};
  EXPECT_FALSE(load(*rig.engine(cached_options()), bad).ok());
}

TEST(FakeDevice, ServingTakesNothingBeyondThePlan) {
  FakeDevice device;
  FakeRig rig(device);
  const auto engine = rig.engine(small_options());
  const MemoryPlan& plan = engine->memory_plan();
  ASSERT_TRUE(plan.device.has_value());
  EXPECT_GT(plan.workspace_bytes, 0);
  const std::int64_t allocations = device.counters().allocations;
  EXPECT_EQ(device.memory()->allocated, plan.total_bytes() - plan.weight_bytes);
  expect_all_as_alone(rig, *engine, mixed_requests(24));
  EXPECT_EQ(device.counters().allocations, allocations);
  EXPECT_THAT(plan.to_string(), AllOf(HasSubstr("activations of the largest pass"),
                                      HasSubstr("device             64.0 MiB")));
}

TEST(FakeDevice, ADecodeStepIsOneLaunchAndOneDownload) {
  FakeDevice device;
  FakeRig rig(device);
  const auto engine = rig.engine(small_options());
  for (std::uint64_t i = 0; i < 3; ++i) {
    Request request = make_request(5, 20, i);
    request.want_routed_experts = false;
    ASSERT_TRUE(engine->submit(request).ok());
  }
  for (int i = 0; i < 6; ++i) {  // prompts, then steps that are run and recorded
    engine->step();
  }
  const DeviceCounters before = device.counters();
  engine->step();
  const DeviceCounters after = device.counters();
  EXPECT_EQ(after.recorded_launches - before.recorded_launches, 1);
  EXPECT_EQ(after.launches, before.launches);
  EXPECT_EQ(after.uploads - before.uploads, 2);
  EXPECT_EQ(after.downloads - before.downloads, 1);
  EXPECT_EQ(after.waits - before.waits, 1);
}

TEST(FakeDevice, PlansNoMorePagesThanFit) {
  EngineOptions options = small_options();
  options.max_seq_len = 4096;  // 1,024 pages of 80 bytes, for each of six
  std::int64_t all = 0;
  {
    FakeDevice roomy;
    FakeRig rig(roomy);
    const auto engine = rig.engine(options);
    EXPECT_EQ(engine->memory_plan().num_pages, 6144);
    all = roomy.memory()->allocated;
  }
  FakeDevice tight(all - 200'000);
  FakeRig rig(tight);
  const auto engine = rig.engine(options);
  EXPECT_LT(engine->memory_plan().num_pages, 6144 - 200'000 / 80);
  EXPECT_GE(engine->memory_plan().num_pages, 1024);
  expect_all_as_alone(rig, *engine, mixed_requests(24));
}

TEST(FakeDevice, SaysWhatFitsBeforeItTakesAnything) {
  FakeDevice device(64 << 10);
  FakeRig rig(device);
  EngineOptions options = small_options();
  options.num_pages = 2000;
  const auto plan = plan_serving(rig.model, rig.ctx, options);
  ASSERT_FALSE(plan.ok());
  EXPECT_THAT(plan.message(), AllOf(HasSubstr("2000 pages of 80"), HasSubstr("of 65536 are free"),
                                    HasSubstr("pages fit"), HasSubstr("64 tokens takes 16")));
  EXPECT_EQ(device.counters().allocations, 0);
  EXPECT_THROW(static_cast<void>(rig.engine(options)), Error);
  options.num_pages = 0;
  options.max_batch_tokens = 4096;
  FakeDevice no_workspace(1 << 20);
  rig.ctx.device = &no_workspace;
  EXPECT_THAT(plan_serving(rig.model, rig.ctx, options).message(),
              HasSubstr("max_batch_tokens 4096 does not fit"));
}

TEST(FakeDevice, AFailedAllocationEndsTheStartAndLeavesNothing) {
  FakeDevice device;
  FakeRig rig(device);
  for (std::int64_t n = 0;; ++n) {
    device.fail_at = device.counters().allocations + n;
    try {
      const auto engine = rig.engine(small_options());
      device.fail_at = -1;
      expect_all_as_alone(rig, *engine, mixed_requests(4));
      EXPECT_GT(n, 10);
      break;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("fake device: allocating"));
      EXPECT_EQ(device.memory()->allocated, 0) << n;
    }
  }
}

/// k3-nano's weights, ops and caches on a device; what its requests get.
std::vector<RequestOutput> generate(Device& device, const std::string& dir) {
  ThreadPool pool(1);
  Arena workspace(std::size_t{1} << 20, device);
  const ExecCtx ctx{&ops_under_test(), &pool, &workspace, nullptr, &device};
  const auto model = load_model(ctx, dir, {}).value_or_throw();
  Engine engine(*model, ctx, {.max_batch_tokens = 24, .max_running_seqs = 5, .max_seq_len = 80});
  std::vector<RequestId> ids;
  for (std::int32_t i = 0; i < 7; ++i) {
    Request request;
    for (std::int32_t t = 0; t < 2 + 9 * i; ++t) {
      request.prompt.push_back((t * 7 + i) % static_cast<std::int32_t>(model->vocab_size()));
    }
    request.sampling.temperature = 0.3F * static_cast<float>(i);
    request.max_new_tokens = 16;
    request.want_logprobs = true;
    request.want_routed_experts = true;
    if (i % 2 == 1) {
      request.rules = {.repetition_penalty = 1.3F, .presence_penalty = 0.5F};
      request.rules.logit_bias = {{i, 4.0F}};
      request.num_top_logprobs = 5;
      request.prompt_logprobs_from = i;
    }
    ids.push_back(engine.submit(request).value_or_throw());
  }
  engine.run_until_idle();
  std::vector<RequestOutput> outputs;
  for (const RequestId id : ids) {
    outputs.push_back(engine.take_output(id).value_or_throw());
  }
  return outputs;
}

TEST(FakeDevice, KimiK3HasTheHostsBits) {
  const std::string dir = ::testing::TempDir() + fmt::format("fake_device_k3_nano_{}", ::getpid());
  kimi_k3::write_initial_checkpoint(kimi_k3::find_preset("k3-nano").value(), {}, dir);
  FakeDevice device;
  const std::vector<RequestOutput> on_host = generate(host_device(), dir);
  const std::vector<RequestOutput> on_device = generate(device, dir);
  std::filesystem::remove_all(dir);
  for (std::size_t i = 0; i < on_host.size(); ++i) {
    EXPECT_TRUE(same_output(on_device[i], on_host[i])) << "request " << i;
  }
  EXPECT_GT(device.counters().recorded_launches, 5);
}

}  // namespace
}  // namespace tandem::test
