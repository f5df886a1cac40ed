// The engine in the GPU's own memory, decoding by recorded graphs: against the CPU where the
// arithmetic is the same, and against itself in other batches, slots and runs, bit for bit.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include <gtest/gtest.h>
#include <unistd.h>

#include "backends/cpu/cpu_backend.h"
#include "backends/cuda/cuda_backend.h"
#include "core/checked_cast.h"
#include "core/rng.h"
#include "engine/engine.h"
#include "models/kimi_k3/init.h"
#include "models/registry.h"
#include "ops/act.h"
#include "ops/embed.h"

namespace tandem::test {
namespace {

struct Checkpoint {
  const char* preset;
  kimi_k3::InitOptions options;
  std::optional<LatentFormat> kv_cache_dtype = {};
  std::uint64_t longest_prompt = 40;  // over 256 keys, attention is merged from chunks
};

kimi_k3::InitOptions stored(bool bf16, kimi_k3::ExpertFormat experts, bool fp8) {
  kimi_k3::InitOptions options;
  options.bf16 = bf16;
  options.experts = experts;
  options.fp8_attention = fp8;
  return options;
}

/// A model on a device of its own, and the folder it came from.
class Machine {
 public:
  Machine(const Checkpoint& checkpoint, std::unique_ptr<Device> device)
      : kv_cache_dtype_(checkpoint.kv_cache_dtype),
        device_(std::move(device)),
        workspace_(std::size_t{16} << 20, memory()),
        ctx_{device_ ? &cuda_backend() : &cpu_backend(), &pool_, &workspace_, nullptr, &memory()} {
    const std::string dir = testing::TempDir() + "on_device_" + std::to_string(::getpid());
    const auto preset = kimi_k3::find_preset(checkpoint.preset).value();
    kimi_k3::write_initial_checkpoint(preset, checkpoint.options, dir);
    model_ = load_model(ctx_, dir, {}).value_or_throw();
    std::filesystem::remove_all(dir);
  }

  [[nodiscard]] const Model& model() const { return *model_; }

  /// Runs all requests, at most `at_once` beside each other, and gives their outputs in order.
  std::vector<RequestOutput> run(const std::vector<Request>& requests, std::int64_t at_once) {
    EngineOptions options;
    options.max_running_seqs = at_once;
    options.max_seq_len = 512;
    options.kv_cache_dtype = kv_cache_dtype_;
    Engine engine(*model_, ctx_, options);
    std::vector<RequestId> ids;
    for (const Request& request : requests) {
      ids.push_back(engine.submit(request).value_or_throw());
    }
    engine.run_until_idle();
    engine.check_integrity();
    std::vector<RequestOutput> outputs;
    for (const RequestId id : ids) {
      outputs.push_back(engine.take_output(id).value_or_throw());
    }
    return outputs;
  }

 private:
  [[nodiscard]] Device& memory() const { return device_ ? *device_ : host_device(); }

  std::optional<LatentFormat> kv_cache_dtype_;
  std::unique_ptr<Device> device_;
  ThreadPool pool_;
  Arena workspace_;
  ExecCtx ctx_;
  std::unique_ptr<Model> model_;
};

std::vector<Request> make_requests(const Model& model, std::int64_t count, float temperature,
                                   std::uint64_t longest_prompt = 40) {
  std::vector<Request> requests;
  for (std::int64_t i = 0; i < count; ++i) {
    Request request;
    Rng rng(mix_key({static_cast<std::uint64_t>(i), 0x0D}));
    const auto length = 1 + rng.below(longest_prompt);
    for (std::uint64_t t = 0; t < length; ++t) {
      request.prompt.push_back(
          static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(model.vocab_size()))));
    }
    request.sampling.temperature = temperature;
    request.max_new_tokens = 128;
    request.sequence_id = static_cast<std::uint64_t>(i);
    request.want_logprobs = true;
    requests.push_back(std::move(request));
  }
  return requests;
}

void expect_same(const RequestOutput& a, const RequestOutput& b, const std::string& what) {
  EXPECT_EQ(a.tokens, b.tokens) << what;
  EXPECT_EQ(a.logprobs, b.logprobs) << what;
}

TEST(OnDevice, GreedyTokensAreTheCpus) {
  for (const char* preset : {"k3-tiny", "k3-nano"}) {
    const Checkpoint checkpoint{preset, {}};
    Machine cpu(checkpoint, nullptr);
    Machine gpu(checkpoint, make_cuda_device({.exact_linear = true}));
    const std::vector<Request> requests = make_requests(cpu.model(), 64, 0.0F);
    const auto expected = cpu.run(requests, 64);
    const auto actual = gpu.run(requests, 64);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(actual[i].tokens, expected[i].tokens) << preset << ", prompt " << i;
    }
  }
}

TEST(OnDevice, ARequestsBitsAreItsOwn) {
  using enum kimi_k3::ExpertFormat;
  const std::vector<Checkpoint> checkpoints{
      {"k3-tiny", stored(false, kPlain, false)},
      {"k3-tiny", stored(true, kMxFp4, false)},
      {"k3-nano", stored(true, kNvFp4, true)},
      {"k3-mini", stored(true, kMxFp4, false)},
      {"k3-mini", stored(true, kMxFp4, false), {}, 340},
      {"k3-mini", stored(true, kMxFp4, false), LatentFormat::kFp8, 340},
      {"k3-mini", stored(true, kMxFp4, false), LatentFormat::kF32, 340}};
  for (const Checkpoint& checkpoint : checkpoints) {
    SCOPED_TRACE(std::string(checkpoint.preset) + ", prompts of up to " +
                 std::to_string(checkpoint.longest_prompt));
    Machine gpu(checkpoint, make_cuda_device({}));
    std::vector<Request> requests = make_requests(gpu.model(), 64, 1.0F, checkpoint.longest_prompt);
    const auto together = gpu.run(requests, 64);
    const auto again = gpu.run(requests, 64);
    const auto few = gpu.run(requests, 5);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      expect_same(again[i], together[i], "run again, request " + std::to_string(i));
      expect_same(few[i], together[i], "five at once, request " + std::to_string(i));
    }
    for (const std::size_t i : {0U, 31U, 63U}) {
      expect_same(gpu.run({requests[i]}, 1)[0], together[i], "alone " + std::to_string(i));
    }
    std::ranges::reverse(requests);
    const auto reversed = gpu.run(requests, 64);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      expect_same(reversed[requests.size() - 1 - i], together[i],
                  "another slot, request " + std::to_string(i));
    }
  }
}

TEST(OnDevice, RulesAndScoresAreARequestsOwn) {
  const Checkpoint checkpoint{"k3-mini", stored(true, kimi_k3::ExpertFormat::kMxFp4, false)};
  Machine gpu(checkpoint, make_cuda_device({}));
  std::vector<Request> requests = make_requests(gpu.model(), 24, 1.0F);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (i % 3 == 0) {
      continue;  // plain ones among them
    }
    Request& request = requests[i];
    request.max_new_tokens = 40;
    request.rules = {.repetition_penalty = 1.2F,
                     .frequency_penalty = 0.3F,
                     .presence_penalty = 0.4F,
                     .logit_bias = {{static_cast<std::int32_t>(i), 8.0F}},
                     .min_new_tokens = 10};
    request.stop_ids = {static_cast<std::int32_t>(i)};
    request.num_top_logprobs = static_cast<std::int64_t>(i % 21);
    request.prompt_logprobs_from = 0;
  }
  const auto together = gpu.run(requests, 24);
  const auto few = gpu.run(requests, 5);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const RequestOutput& output = together[i];
    expect_same(few[i], output, "five at once, request " + std::to_string(i));
    if (requests[i].num_top_logprobs == 0) {
      continue;
    }
    EXPECT_GT(output.tokens.size(), 10U);  // the bias makes every token before an early stop
    EXPECT_EQ(std::ranges::count(output.tokens, requests[i].stop_ids[0]),
              output.finish_reason == FinishReason::kStop ? 1 : 0);
    ASSERT_EQ(output.prompt_logprobs.size(), requests[i].prompt.size());
    EXPECT_TRUE(std::equal(output.prompt_logprobs.begin() + 1, output.prompt_logprobs.end(),
                           few[i].prompt_logprobs.begin() + 1));
    for (std::size_t t = 0; t < output.tokens.size(); ++t) {
      const auto& top = output.top_logprobs[t];
      ASSERT_EQ(isize(top), requests[i].num_top_logprobs);
      EXPECT_TRUE(std::ranges::is_sorted(top, std::ranges::greater(), &TokenLogprob::logprob));
      EXPECT_LE(output.logprobs[t], top.front().logprob);
      const auto own = std::ranges::find(top, output.tokens[t], &TokenLogprob::token);
      EXPECT_TRUE(own == top.end() || own->logprob == output.logprobs[t]);
    }
  }
}

TEST(OnDevice, SaysWhatItCannotDo) {
  EXPECT_THROW(static_cast<void>(make_cuda_device({.ordinal = 99})), Error);
  const auto device = make_cuda_device({});
  try {
    static_cast<void>(device->allocate(std::size_t{1} << 46));
    FAIL() << "64 TiB were allocated";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("allocating 70368744177664 bytes"), std::string::npos)
        << error.what();
  }
}

TEST(OnDevice, KeepsToItsMemoryLimit) {
  const auto device = make_cuda_device({.memory_limit = 64 << 20});
  const Storage most(60 << 20, *device);
  EXPECT_EQ(device->memory()->free, 4 << 20);
  EXPECT_THROW(Storage(5 << 20, *device), Error);
  EXPECT_EQ(Storage(4 << 20, *device).size_bytes(), 4 << 20);
}

TEST(OnDevice, ServingAllocatesNothing) {
  Checkpoint checkpoint{"k3-nano", stored(true, kimi_k3::ExpertFormat::kNvFp4, false)};
  std::unique_ptr<Device> owned = make_cuda_device({});
  Device& device = *owned;
  Machine gpu(checkpoint, std::move(owned));
  const auto before = gpu.run(make_requests(gpu.model(), 40, 1.0F), 33);
  const std::int64_t allocated = device.memory()->allocated;
  const auto after = gpu.run(make_requests(gpu.model(), 40, 1.0F), 33);
  EXPECT_EQ(device.memory()->allocated, allocated);  // each run's engine gave all of its own back
  expect_same(after.front(), before.front(), "the first request");
}

TEST(OnDevice, TracesKernelsInsideRecordings) {
  const auto device = make_cuda_device({});
  ThreadPool pool(1);
  Arena workspace(std::size_t{1} << 20, *device);
  const ExecCtx ctx{&cuda_backend(), &pool, &workspace, nullptr, device.get()};
  Storage memory(3 * 64 * 4, *device);
  float* const data = memory.as<float>().data();
  const auto add = [&] {
    for (int i = 0; i < 5; ++i) {
      ops::add(ctx, {data + 128, {1, 64}}, {data, {1, 64}}, {data + 64, {1, 64}});
    }
  };
  using Kind = TraceEvent::Kind;
  const auto count = [](const std::vector<TraceEvent>& trace, Kind kind) {
    return std::ranges::count(trace, kind, &TraceEvent::kind);
  };
  EXPECT_EQ(count(device->trace(add), Kind::kKernel), 5);
  const auto recording = device->record(add);
  const std::vector<TraceEvent> trace = device->trace([&] { recording->launch(); });
  EXPECT_EQ(count(trace, Kind::kKernel), 5);
  ASSERT_EQ(count(trace, Kind::kCall), 1);
  EXPECT_EQ(std::ranges::find(trace, Kind::kCall, &TraceEvent::kind)->name, "cudaGraphLaunch");
}

/// In a process of its own, as the GPU is lost to it: an id far outside the table, which nobody can
/// check on the way to the GPU, makes a kernel read foreign memory.
TEST(LostDevice, IsAnErrorThatNamesTheOpAndEndsInOrder) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto lose = [] {
    const auto device = make_cuda_device({});
    ThreadPool pool(1);
    Arena workspace(std::size_t{1} << 20, *device);
    const ExecCtx ctx{&cuda_backend(), &pool, &workspace, nullptr, device.get()};
    Storage table(64 * 4, *device);
    Storage rows(64 * 4, *device);
    Storage ids(4, *device);
    const std::int32_t far = 1 << 30;
    device->upload(ids.data(), &far, sizeof far);
    const WeightRef weight = WeightRef::of({table.as<float>().data(), {1, 64}});
    try {
      ops::embed(ctx, {rows.as<float>().data(), {1, 64}}, weight,
                 {ids.as<std::int32_t>().data(), {1}});
      device->synchronize();
    } catch (const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return;
    }
    std::fputs("no error\n", stderr);
  };
  EXPECT_EXIT(
      {
        lose();  // and its buffers, arena and device go
        std::_Exit(3);
      },
      ::testing::ExitedWithCode(3), "given last: embed.*cannot be used by this process any more");
}

}  // namespace
}  // namespace tandem::test
