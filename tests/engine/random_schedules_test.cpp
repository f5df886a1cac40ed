// random_schedules_test.cpp — random requests with common beginnings under random options: chunk
// budgets, page and checkpoint grids, few pages and slots, forced preemption, priorities, clients,
// groups, aborts, pauses, the prefix cache on and off. Every output is that of the request alone.
// TDM_RANDOM_SCHEDULES: how many schedules (ctest runs 10,000 under the label slow).
#include <cstdlib>
#include <map>

#include "engine_rig.h"

namespace tandem::test {
namespace {

constexpr std::int64_t kMaxSeqLen = 72;

/// Requests to draw from, each with what it must give. Prompts are a stem, often a branch of it,
/// often a tail.
class Requests {
 public:
  explicit Requests(const Rig& rig) {
    for (std::uint64_t i = 0; i < 160; ++i) {
      Rng rng(mix_key({i, 0xA11}));
      const auto up_to = [&](std::uint64_t n) { return static_cast<std::int64_t>(rng.below(n)); };
      std::vector<std::int32_t> prompt = random_tokens(1 + up_to(24), rng.below(3));
      prompt = longer(std::move(prompt), up_to(2) * 8, rng.below(3));
      prompt = longer(std::move(prompt), up_to(3) * up_to(12), i);
      Request request = cacheable_request(std::move(prompt), 1 + up_to(14), i);
      request.sampling.temperature = rng.below(4) == 0 ? 0.0F : 1.0F;
      request.want_routed_experts = rng.below(12) == 0;
      if (rng.below(6) == 0) {
        request.prompt_logprobs_from = up_to(request.prompt.size() + 1);
        request.num_top_logprobs = up_to(3);
      }
      if (rng.below(6) == 0) {
        request.rules = {.repetition_penalty = 1.3F, .presence_penalty = 0.5F};
      }
      request.cache_salt = std::string(rng.below(8) == 0 ? 1 : 0, 's');
      request.priority = rng.below(3) == 0 ? 1 : 0;
      request.client = std::string(1 + rng.below(2), 'c');
      requests_.push_back(request);
      expected_.push_back(expected_output(rig, request));
    }
  }
  [[nodiscard]] std::size_t size() const { return requests_.size(); }
  [[nodiscard]] const Request& request(std::size_t i) const { return requests_[i]; }
  [[nodiscard]] const RequestOutput& expected(std::size_t i) const { return expected_[i]; }

 private:
  std::vector<Request> requests_;
  std::vector<RequestOutput> expected_;
};

EngineOptions random_options(Rng& rng) {
  const auto pick = [&](std::initializer_list<std::int64_t> values) {
    return values.begin()[rng.below(values.size())];
  };
  EngineOptions options;
  options.max_seq_len = kMaxSeqLen;
  options.page_size = pick({1, 2, 4, 8});
  options.checkpoint_tokens = options.page_size * pick({1, 2, 4});
  options.max_batch_tokens = pick({1, 7, 64, 4096});
  options.max_prefill_tokens = pick({0, 0, 5});
  options.max_running_seqs = pick({1, 2, 5, 9});
  const std::int64_t least = kMaxSeqLen / options.page_size;
  options.num_pages = pick({least, least + 3, 2 * least, 9 * least});
  options.num_checkpoint_slots = pick({1, 2, 6, 30});
  options.prefix_cache = rng.below(4) != 0;
  options.preempt_every = pick({0, 0, 1, 3, 8});
  return options;
}

struct Totals {
  std::int64_t preemptions = 0;
  std::int64_t hits = 0;
  std::int64_t evicted_pages = 0;
  std::int64_t aborts = 0;
};

class Schedule {
 public:
  Schedule(Rig& rig, const Requests& requests, std::uint64_t seed)
      : requests_(requests), rng_(mix_key({seed, 0x5C4ED})), options_(random_options(rng_)) {
    engine_ = rig.engine(options_);
  }

  void run(Totals& totals) {
    const std::size_t first = rng_.below(requests_.size());  // neighbours, so that some repeat
    for (std::uint64_t left = 4 + rng_.below(10); left > 0;) {
      if (rng_.below(3) != 0) {
        engine_->step();
      } else {
        submit((first + rng_.below(40)) % requests_.size());
        --left;
      }
      disturb();
    }
    engine_->resume();
    while (engine_->has_work()) {
      engine_->step();
      disturb();
      engine_->resume();
    }
    engine_->check_integrity();
    expect_outputs(totals);
    const EngineStats stats = engine_->stats();
    totals.preemptions += stats.num_preemptions;
    totals.hits += stats.prefix.num_hits;
    totals.evicted_pages += stats.num_evicted_pages;
  }

 private:
  void submit(std::size_t index) {
    if (rng_.below(6) != 0) {
      submitted_[engine_->submit(requests_.request(index)).value_or_throw()] = index;
      return;
    }
    // A group's first sample is the request itself; of the others only the prompt is known here.
    const auto ids = engine_->submit_group(requests_.request(index), 3).value_or_throw();
    submitted_[ids[0]] = index;
  }

  void disturb() {
    switch (rng_.below(40)) {
      case 0:
        engine_->preempt_all();
        break;
      case 1:
      case 2: {
        const auto victim = std::next(
            submitted_.begin(), static_cast<std::ptrdiff_t>(rng_.below(submitted_.size() + 1)));
        if (victim != submitted_.end() && engine_->abort(victim->first)) {
          aborted_[victim->first] = true;
        }
        break;
      }
      case 3:
        engine_->pause(rng_.below(2) == 0 ? PauseMode::kInPlace : PauseMode::kRetract);
        break;
      case 4:
        EXPECT_EQ(engine_->flush_cache().ok(), engine_->stats().num_running == 0);
        break;
      default:
        engine_->resume();
    }
    if (rng_.below(4) == 0) {
      engine_->check_integrity();
    }
  }

  void expect_outputs(Totals& totals) {
    for (const auto& [id, index] : submitted_) {
      const RequestOutput output = engine_->take_output(id).value_or_throw();
      const RequestOutput& expected = requests_.expected(index);
      if (!aborted_.contains(id)) {
        EXPECT_TRUE(same_output(output, expected)) << "request " << index;
        continue;
      }
      ++totals.aborts;
      EXPECT_EQ(output.finish_reason, FinishReason::kAborted);
      ASSERT_LE(output.tokens.size(), expected.tokens.size());
      EXPECT_TRUE(std::equal(output.tokens.begin(), output.tokens.end(), expected.tokens.begin()));
    }
    expect_idle_and_empty(*engine_);
  }

  const Requests& requests_;
  Rng rng_;
  EngineOptions options_;
  std::unique_ptr<Engine> engine_;
  std::map<RequestId, std::size_t> submitted_;
  std::map<RequestId, bool> aborted_;
};

TEST(RandomSchedules, GiveWhatEachRequestGivesAlone) {
  const char* const many = std::getenv("TDM_RANDOM_SCHEDULES");
  const std::int64_t count = many == nullptr ? 300 : std::atoll(many);
  Rig rig;
  const Requests requests(rig);
  Totals totals;
  for (std::int64_t seed = 0; seed < count && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Schedule(rig, requests, static_cast<std::uint64_t>(seed)).run(totals);
  }
  // The options reach the rare paths.
  EXPECT_GT(totals.preemptions, count);
  EXPECT_GT(totals.hits, count);
  EXPECT_GT(totals.evicted_pages, count);
  EXPECT_GT(totals.aborts, count / 10);
}

}  // namespace
}  // namespace tandem::test
