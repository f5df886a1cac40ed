// engine_bench.cpp — prefill and decode of a checkpoint through the engine, against the read
// bandwidth measured in the same run.
//
//   engine_bench CHECKPOINT_DIR [threads]      e.g. the folder of `tandem init k3-mini DIR`
//
// Decode starts from 128-token prompts and runs 64 tokens a sequence. Bytes a token needs: the
// packed weights it reads (active experts only) plus its recurrent states, read and written, and
// its latent rows. Medians of kRounds; after each figure
// the share of each op (of the whole phase, prefill of the prompts included).

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <vector>

#include <fmt/format.h>

#include "backends/cpu/cpu_backend.h"
#include "core/checked_cast.h"
#include "core/rng.h"
#include "core/timing.h"
#include "engine/engine.h"
#include "models/registry.h"
#include "tensor/storage.h"

namespace tandem {
namespace {

constexpr int kRounds = 5;
constexpr std::int64_t kPromptTokens = 128;
constexpr std::int64_t kDecodeTokens = 64;

/// GB/s of summing 1 GiB with all threads: the ceiling of decode.
class ReadBandwidth {
 public:
  explicit ReadBandwidth(ThreadPool& pool) : pool_(pool), data_(std::int64_t{1} << 30) {
    std::ranges::fill(data_.as<std::uint64_t>(), 1U);
  }
  [[nodiscard]] double measure() const {
    constexpr std::int64_t kBlocks = 256;
    const auto words = data_.as<std::uint64_t>();
    const std::size_t block = words.size() / kBlocks;
    std::vector<std::uint64_t> sums(kBlocks);
    const auto start = Clock::now();
    pool_.parallel_for(kBlocks, [&](std::int64_t b, int) {
      std::uint64_t lanes[16] = {};
      const std::uint64_t* from = words.data() + usize(b) * block;
      for (std::size_t i = 0; i < block; i += 16) {
        for (std::size_t lane = 0; lane < 16; ++lane) {
          lanes[lane] += from[i + lane];
        }
      }
      sums[usize(b)] = std::accumulate(std::begin(lanes), std::end(lanes), std::uint64_t{0});
    });
    const double seconds = seconds_since(start);
    if (std::accumulate(sums.begin(), sums.end(), std::uint64_t{0}) != words.size()) {
      std::abort();  // keeps the sum alive
    }
    return static_cast<double>(data_.size_bytes()) / seconds / 1e9;
  }

 private:
  ThreadPool& pool_;
  Storage data_;
};

Request random_request(const Model& model, std::int64_t prompt_tokens, std::int64_t new_tokens,
                       std::uint64_t id) {
  Request request;
  Rng rng(mix_key({id, 0xBE7C}));
  for (std::int64_t i = 0; i < prompt_tokens; ++i) {
    request.prompt.push_back(
        static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(model.vocab_size()))));
  }
  request.max_new_tokens = new_tokens;
  request.seed = id;
  return request;
}

EngineOptions options_for(std::int64_t batch, std::int64_t max_len) {
  EngineOptions options;
  options.max_running_seqs = batch;
  options.max_seq_len = max_len;
  options.max_batch_tokens = 512;
  return options;
}

/// Seconds from a prompt of `tokens` to its first sampled token.
double prefill_seconds(Engine& engine, const Model& model, std::int64_t tokens, std::uint64_t id) {
  const RequestId request = engine.submit(random_request(model, tokens, 1, id)).value_or_throw();
  const auto start = Clock::now();
  engine.run_until_idle();
  const double seconds = seconds_since(start);
  static_cast<void>(engine.take_output(request));
  return seconds;
}

/// Seconds a decode step of `batch` sequences takes: prompts are prefilled before the clock starts.
double decode_step_seconds(Engine& engine, const Model& model, std::int64_t batch,
                           std::uint64_t id) {
  std::vector<RequestId> ids;
  for (std::int64_t b = 0; b < batch; ++b) {
    ids.push_back(engine
                      .submit(random_request(model, kPromptTokens, kDecodeTokens + 1,
                                             id * 100 + static_cast<std::uint64_t>(b)))
                      .value_or_throw());
  }
  std::vector<double> steps;
  while (engine.has_work()) {
    const std::int64_t before = engine.stats().decode_tokens;
    const auto start = Clock::now();
    static_cast<void>(engine.step());
    const double seconds = seconds_since(start);
    if (engine.stats().decode_tokens - before == batch) {
      steps.push_back(seconds);
    }
  }
  for (const RequestId request : ids) {
    static_cast<void>(engine.take_output(request));
  }
  return median(steps);
}

int run(const std::string& dir, int threads) {
  ThreadPool pool(threads);
  Arena workspace;
  Profiler profiler;
  const ExecCtx ctx{&cpu_backend(), &pool, &workspace, &profiler};
  const auto model = load_model(ctx, dir, {}).value_or_throw();
  const ModelFootprint footprint = model->footprint();
  const double token_bytes = static_cast<double>(
      footprint.decode_read_bytes + 2 * model->cache_spec().bytes_per_sequence() +
      model->cache_spec().bytes_per_token() * (kPromptTokens + kDecodeTokens / 2));
  fmt::print("{}: {:.1f} M parameters, {:.1f} M active, {:.1f} MB a token at batch 1, {} threads\n",
             dir, 1e-6 * static_cast<double>(footprint.num_parameters),
             1e-6 * static_cast<double>(footprint.num_active_parameters), 1e-6 * token_bytes,
             pool.num_threads());

  const ReadBandwidth bandwidth(pool);
  std::vector<double> read;
  std::vector<double> prefill;
  Engine prefill_engine(*model, ctx, options_for(1, 1024));
  prefill_seconds(prefill_engine, *model, 512, 0);
  for (int round = 0; round < kRounds; ++round) {
    prefill.push_back(
        512 / prefill_seconds(prefill_engine, *model, 512, static_cast<std::uint64_t>(round) + 1));
  }
  fmt::print("prefill 512: {:.1f} tok/s\n{}", median(prefill), profiler.table());
  double batch1 = 0;
  for (const std::int64_t batch : {1, 8, 16}) {
    profiler.clear();
    Engine engine(*model, ctx, options_for(batch, kPromptTokens + kDecodeTokens + 8));
    std::vector<double> rates;
    for (int round = 0; round < kRounds; ++round) {
      read.push_back(bandwidth.measure());  // alternates with what it is compared to
      rates.push_back(
          static_cast<double>(batch) /
          decode_step_seconds(engine, *model, batch, static_cast<std::uint64_t>(round)));
    }
    const double rate = median(rates);
    batch1 = batch == 1 ? rate : batch1;
    fmt::print("decode B={:<3} {:>7.1f} tok/s  {:.2f} x batch 1", batch, rate, rate / batch1);
    if (batch == 1) {
      fmt::print("  {:.2f} GB/s = {:.0f}% of {:.2f} GB/s read", rate * token_bytes / 1e9,
                 100 * rate * token_bytes / 1e9 / median(read), median(read));
    }
    fmt::print("\n{}", profiler.table());
  }
  return 0;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: engine_bench CHECKPOINT_DIR [threads]\n");
    return 2;
  }
  return tandem::run(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
}
