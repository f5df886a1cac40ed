// requests_test.cpp — what a client or a config may get wrong, and the sentence it gets back.
#include <cmath>
#include <limits>

#include <gmock/gmock.h>

#include "engine_rig.h"

namespace tandem::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(Engine& engine, const Request& request) {
  Expected<RequestId> id = engine.submit(request);
  Expected<std::vector<RequestId>> group = engine.submit_group(request, 2);
  EXPECT_FALSE(id.ok());
  EXPECT_FALSE(group.ok());
  EXPECT_EQ(id.message(), group.message());
  return id.message();
}

TEST(Requests, RefusalsNameTheFieldAndWhatWasExpected) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  const Request good = make_request(4, 4);

  Request request = good;
  request.prompt.clear();
  EXPECT_EQ(refusal(*engine, request), "prompt is empty: expected at least one token");

  request = good;
  request.prompt[2] = 37;
  EXPECT_EQ(refusal(*engine, request), "prompt[2] is 37: expected a token id in [0, 37)");
  request.prompt[2] = -1;
  EXPECT_THAT(refusal(*engine, request), HasSubstr("prompt[2] is -1"));

  request = good;
  request.stop_ids = {1, 1000};
  EXPECT_THAT(refusal(*engine, request), HasSubstr("stop_ids[1] is 1000"));

  request = good;
  request.max_new_tokens = 0;
  EXPECT_THAT(refusal(*engine, request), HasSubstr("max_new_tokens is 0"));
  request.max_new_tokens = -5;
  EXPECT_THAT(refusal(*engine, request), HasSubstr("max_new_tokens is -5"));
  for (const std::int64_t too_many : {std::int64_t{61}, std::numeric_limits<std::int64_t>::max()}) {
    request.max_new_tokens = too_many;
    EXPECT_THAT(refusal(*engine, request), AllOf(HasSubstr("max_new_tokens is"),
                                                 HasSubstr("max_seq_len 64"), HasSubstr("60")));
  }
  request.max_new_tokens = 1;
  for (const std::int64_t size : {64, 65}) {
    request.prompt = random_tokens(size, 1);
    EXPECT_THAT(refusal(*engine, request), HasSubstr("at most 0"));
  }
  expect_idle_and_empty(*engine);
}

TEST(Requests, SamplingParametersAreChecked) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<SamplingParams, std::string>> bad{
      {{.temperature = -1.0F}, "temperature"},
      {{.temperature = nan}, "temperature"},
      {{.temperature = inf}, "temperature"},
      {{.top_k = -1}, "top_k"},
      {{.top_p = 0.0F}, "top_p"},
      {{.top_p = 5.0F}, "top_p"},
      {{.top_p = nan}, "top_p"},
      {{.min_p = -0.1F}, "min_p"},
      {{.min_p = 1.5F}, "min_p"},
      {{.min_p = nan}, "min_p"}};
  for (const auto& [params, field] : bad) {
    Request request = make_request(4, 4);
    request.sampling = params;
    EXPECT_THAT(refusal(*engine, request), AllOf(HasSubstr(field), HasSubstr("expected")));
  }
}

TEST(Requests, LimitsThemselvesAreAllowed) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  EXPECT_TRUE(engine->submit(make_request(63, 1)).ok());
  EXPECT_TRUE(engine->submit(make_request(1, 63)).ok());
  Request request = make_request(1, 1);
  request.prompt = {36};
  request.sampling = {.temperature = 0.0F, .top_k = 1000, .top_p = 1.0F, .min_p = 1.0F};
  EXPECT_TRUE(engine->submit(request).ok());
  EXPECT_THAT(engine->submit_group(request, 0).message(), HasSubstr("n is 0"));
  engine->run_until_idle();
}

TEST(Requests, OutputsAreTakenOnce) {
  Rig rig;
  const auto engine = rig.engine(small_options());
  const RequestId id = engine->submit(make_request(4, 4)).value_or_throw();
  EXPECT_THAT(engine->take_output(id).message(), HasSubstr("request 1: not finished, 0 of 4"));
  engine->run_until_idle();
  EXPECT_TRUE(engine->take_output(id).ok());
  EXPECT_THAT(engine->take_output(id).message(), HasSubstr("request 1: unknown"));
}

TEST(Options, AllProblemsAtOnce) {
  EngineOptions options{
      .max_batch_tokens = 0, .max_running_seqs = -1, .page_size = 0, .cache_bytes = -1};
  const Status status = options.validate();
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("max_batch_tokens is 0"), HasSubstr("max_running_seqs is -1"),
                    HasSubstr("page_size is 0"), HasSubstr("cache_bytes is -1")));
  EXPECT_TRUE(EngineOptions{}.validate().ok());
}

TEST(Options, MemoryPlanFollowsFromTheModel) {
  FakeModel model;  // 3 + 2 latent floats a token; states of 6 and 4, windows of 6 and 1 floats
  EngineOptions options = small_options();
  const MemoryPlan plan = plan_memory(model, options).value_or_throw();
  EXPECT_EQ(plan.weight_bytes, 1 << 20);
  EXPECT_EQ(plan.page_bytes, 4 * 5 * 4);
  for (const LatentFormat format : {LatentFormat::kBF16, LatentFormat::kFp8}) {
    EngineOptions smaller = options;
    smaller.kv_cache_dtype = format;
    EXPECT_EQ(plan_memory(model, smaller).value_or_throw().page_bytes,
              4 * 5 * element_bytes(format));
  }
  EXPECT_EQ(plan.slot_bytes, (6 + 6 + 4 + 1) * 4);
  EXPECT_EQ(plan.num_slots, 6);
  EXPECT_EQ(plan.num_pages, 6 * 16);  // six sequences of 64 tokens in pages of 4
  EXPECT_THAT(plan.to_string(), AllOf(HasSubstr("96 pages of 4 tokens"), HasSubstr("6 slots"),
                                      HasSubstr("weights             1.0 MiB")));
  options.prefix_cache = false;  // no memory for checkpoints
  options.cache_bytes = 6 * plan.slot_bytes + 20 * plan.page_bytes + 3;
  EXPECT_EQ(plan_memory(model, options).value_or_throw().num_pages, 20);
}

TEST(Options, RefusesToStartWithLessThanOneSequence) {
  Rig rig;
  EngineOptions options = small_options();
  options.num_pages = 15;
  EXPECT_THAT(plan_memory(rig.model, options).message(), HasSubstr("at least 16 pages"));
  EXPECT_THROW((void)rig.engine(options), Error);
  options.num_pages = 0;
  options.cache_bytes = 6 * 17 * 4 + 16 * 80 - 1;
  EXPECT_THAT(plan_memory(rig.model, options).message(),
              HasSubstr("at least 16 pages (1688 bytes"));
  options.cache_bytes += 1;
  EXPECT_TRUE(plan_memory(rig.model, options).ok());
  options.num_pages = 17;
  EXPECT_THAT(plan_memory(rig.model, options).message(), HasSubstr("cache_bytes is 1688"));
  options = small_options();
  options.eos_ids = {37};
  EXPECT_THAT(plan_memory(rig.model, options).message(), HasSubstr("eos_ids has 37"));
}

}  // namespace
}  // namespace tandem::test
